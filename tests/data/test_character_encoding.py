"""Encodings of text files: guessed from their letters, or given, and the same for rows to predict."""

import pytest

import mooring
from mooring.core.errors import RequestError
from mooring.data.character_encoding import example_word, guess_code_page
from mooring.data.loading import load

WORDS = {
    "cp1252": (
        "Größe Zürich Fürth",
        "département Besançon Nîmes âge",
        "año Logroño Málaga niños",
        "Tromsø Ålesund Bodø",
    ),
    "cp1250": ("sprzedaż Łódź Gdańsk Wrocław Częstochowa", "město Třebíč Plzeň žák", "Győr Székesfehérvár szűk"),
    "cp1251": ("город Москва Казань Пермь", "місто Київ Львів", "град Ниш Чачак љето"),
    "cp1253": ("πόλη Αθήνα Πάτρα Βόλος",),
    "cp1254": ("şehir İstanbul Muğla Ağrı yaş",),
    "cp1257": ("miestas Šiauliai Panevėžys ąžuolas įmonė", "Rīga Liepāja Jēkabpils Ķegums"),
}


@pytest.mark.parametrize(("encoding", "text"), [(k, text) for k, texts in WORDS.items() for text in texts])
def test_letters_show_the_code_page(encoding, text):
    content = ("name;n\n" + "\n".join(f"{word};1 200,- €" for word in text.split())).encode(encoding, "replace")
    assert guess_code_page(content).removeprefix("cp") == encoding.removeprefix("cp")
    assert content.decode(guess_code_page(content)).split("\n")[1].startswith(text.split()[0])


def test_punctuation_and_symbols_show_nothing():
    assert guess_code_page("„Größe“ – 5 m² § 3 «Fürth» 20° 5€".encode("cp1252")) == "cp1252"
    assert guess_code_page(b"\x81\x8d") == "latin-1"  # not in cp1252
    assert example_word("a,b\nGdańsk,1") == "Gdańsk" and example_word("plain") == ""


def polish_table(word: str = "Gdańsk") -> str:
    rows = (f"{'Łódź' if i % 2 else word},{i / 7:.3f},{i % 5 / 3 + i % 2:.3f}\n" for i in range(80))
    return "miasto,x,y\n" + "".join(rows)


def test_given_and_guessed_encodings(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(polish_table().encode("cp1250"))
    guessed = load(path, client="miasto", target="y")
    assert set(guessed.names) == {"Łódź", "Gdańsk"}
    assert any("read as cp1250 ('Gdańsk'); --encoding sets another" in note for note in guessed.notes)
    given = load(path, client="miasto", target="y", encoding="cp1252")
    assert "Gdañsk" in given.names and not any("encoding" in note for note in given.notes)
    path.write_bytes(polish_table().encode("utf-16-le"))  # without a byte order mark
    assert set(load(path, client="miasto", target="y", encoding="utf-16-le").names) == {"Łódź", "Gdańsk"}


def test_refusals(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(polish_table().encode("cp1250"))
    with pytest.raises(RequestError, match="encoding 'klingon' is not known; use a name such as"):
        load(path, client="miasto", target="y", encoding="klingon")
    with pytest.raises(RequestError, match=r"data\.csv: is not readable as utf-8"):
        load(path, client="miasto", target="y", encoding="utf-8")


def test_rows_to_predict_are_read_like_the_run(tmp_path):
    (tmp_path / "data.csv").write_bytes(
        polish_table("Gdaňsk").encode("cp1250")
    )  # Polish and Czech: no language has both
    mooring.fit(tmp_path / "data.csv", client="miasto", target="y", encoding="cp1250", out=tmp_path / "run")
    for encoding in ("cp1250", "utf-8"):
        (tmp_path / "new.csv").write_bytes(polish_table("Gdaňsk").encode(encoding))
        predicted, _ = mooring.predict(tmp_path / "run", tmp_path / "new.csv")
        assert set(predicted["miasto"]) == {"Łódź", "Gdaňsk"}
