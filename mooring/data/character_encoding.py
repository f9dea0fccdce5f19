"""The character encoding of a text file that is not UTF-8.

Every byte above 127 is a letter in most code pages, so that a wrong one shows itself by letters that no language uses
together: Gdańsk in cp1250 would be Gdañsk in cp1252. A code page is plausible if one language of it has all the letters
that the text would then contain; the first plausible one is taken, and cp1252 where none is.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from mooring.core.errors import RequestError

UTF8, WINDOWS, LATIN = "utf-8-sig", "cp1252", "latin-1"
MAX_EXAMPLE_CHARACTERS = 40  # characters of a word in a note
# Letters beyond a to z by language: western, central European, Turkish, Baltic, Cyrillic, Greek. Not Icelandic, whose
# letters in cp1252 are Turkish ones in cp1254: its texts have others, too, so that no code page is plausible.
ALPHABETS = {
    "cp1252": (
        "äöüß", "àâæçéèêëîïôœùûüÿ", "áéíñóúü", "ãâáàçéêíóôõúü", "åäöé", "æøåé", "àèéìíòóùú", "áàçéèêëïíóöü",
        "àçéèíïóòúü",
    ),
    "cp1250": ("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "čćđšž", "ăâîşţ"),
    "cp1254": ("çğıöşüâîû\u0307",),  # the dot of İ in lower case
    "cp1257": ("ąčęėįšųūž", "āčēģīķļņšūž", "äöõüšž"),
    "cp1251": (
        "абвгдеёжзийклмнопрстуфхцчшщъыьэюя", "абвгґдеєжзиіїйклмнопрстуфхцчшщьюя", "абвгдежзијклљмнњопрстћуфхцчџшђ",
    ),
    "cp1253": ("αβγδεζηθικλμνξοπρστυφχψωςάέήίόύώϊϋΐΰ",),
}  # fmt: skip
PUNCTUATION = "§°€«»„“”’‘–—…·¿¡£©®²³½µ\xa0"  # beside words, not within them


def require_encoding(name: str) -> str:
    """Return an encoding's name as given; one that Python does not have is refused."""
    try:
        codecs.lookup(name)
    except LookupError as failure:
        raise RequestError(f"encoding '{name}' is not known; use a name such as utf-8, cp1250 or latin-1.") from failure
    return name


def guess_code_page(content: bytes) -> str:
    """Return the code page of a text that is not UTF-8."""
    words = set(re.findall(rb"[A-Za-z]*[\x80-\xff][A-Za-z\x80-\xff]*", content))
    for encoding, alphabets in ALPHABETS.items():
        try:
            decoded = {word.decode(encoding) for word in words}
        except UnicodeDecodeError:
            continue
        letters = non_ascii_letters(decoded)
        if any(letters <= set(alphabet) for alphabet in alphabets):
            return encoding
    try:
        content.decode(WINDOWS)
    except UnicodeDecodeError:
        return LATIN
    return WINDOWS


def non_ascii_letters(words: Iterable[str]) -> set[str]:
    """Return the characters of words that are not ASCII, in lower case, without punctuation at their ends."""
    inner = (word.strip(PUNCTUATION).lower() for word in words)
    return {letter for word in inner for letter in word if not letter.isascii()}


def example_word(text: str) -> str:
    """Return the first word with a character that is not ASCII; "" without any."""
    match = re.search(r"\w*[^\x00-\x7f]\w*", text)
    return "" if match is None else match.group()[:MAX_EXAMPLE_CHARACTERS]
