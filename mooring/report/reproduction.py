"""What came out of the experiments, from their records: figures, tables, an overview and a page for each paper."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.core.papers import BY_KEY, PAPERS
from mooring.report.markdown import brief, key_number, markdown, number, table
from mooring.report.terminal import Display
from mooring.runs.files import make_folder, read_json, write_whole

HEAD = """# Reproduction of the five papers

Every claim of the papers' figures and tables is a function of our results and gets one of three words:

- **held**: it holds beyond the 95 % interval over repeats;
- **open**: the interval reaches both sides, or there is only one repeat; the page says how many repeats would decide;
- **contradicted**: the whole interval lies on the other side; *explained* are those with a reason and what shows it.

`mooring reproduce ID` runs one of them again; these pages are written by `mooring reproduce ... --page`. Experiments
run at two sizes: `quick`, minutes each, often on small stand-in data, and `paper`, the paper's own. Where both were
run, the paper's size counts. The papers stand in [papers.md](papers.md).
"""
PRESETS = ("quick", "paper")  # on the pages, in this order; smoke runs are no results
HELD, OPEN, CONTRADICTED = WORDS = ("held", "open", "contradicted")
EXPLAINED, NOT_RUN = "explained", "not run"

Records = Sequence[Mapping[str, Any]]


def title(record: Mapping[str, Any]) -> str:
    """The experiment's title, with its data where they are not the paper's."""
    return f"{record['experiment']}: {record['title']}" + (f" (data: {record['data']})" if record["data"] else "")


def draw_record(record: Mapping[str, Any], folder: str | Path) -> None:
    """The figure and the tables of a record, beside it."""
    from mooring.report.panels import draw

    name = Path(folder) / f"{record['experiment']}-{record['preset']}"
    if record["panels"]:
        for ending, data in draw(title(record), record["panels"]).items():
            write_whole(f"{name}.{ending}", data)
    if record["tables"]:
        parts = [f"# {title(record)}", *(table(one) for one in record["tables"])]
        write_whole(f"{name}.md", "\n\n".join(parts).encode())


def show_claims(display: Display, claims: Records, preset: str, folder: str | Path) -> None:
    """Every claim of a selection in the terminal."""
    rows = [{**row, "worst": brief(dict(row["worst"]))} for row in claims]
    columns = {"experiment": "experiment", "says": "claim", "word": "", "worst": "decided by"}
    counts = ", ".join(f"{sum(row['word'] == word for row in claims)} {word}" for word in WORDS)
    heading = f"{len(claims)} claims, preset {preset}: {counts}"
    display.table(heading, rows, columns, f"Figures and tables: {folder}", spare=("worst",))


def write_page(records: str | Path, page: str | Path, known: Records = ()) -> None:
    """Write the overview and, in a folder of its name, a page for each paper, from all records in a folder.

    `known` are the experiments that there are, as `mooring list experiments` tells them: what was not run says so.
    """
    folder, page = Path(records), Path(page)
    found = [record for path in sorted(folder.glob("*.json")) if _is_result(record := read_json(path))]
    if not found:
        raise RequestError(f"{folder} holds no record of an experiment; run `mooring reproduce all --out {folder}`.")
    there = {record["experiment"] for record in found}
    missing = [{**one, "experiment": one["id"]} for one in known if one["id"] not in there]
    pages = page.parent / page.stem
    make_folder(pages.absolute())
    rows = []
    ordered = sorted([*found, *missing], key=_order)
    for paper, group in groupby(ordered, key=lambda record: record["paper"]):
        mine = {one: list(same) for one, same in groupby(group, key=lambda record: record["experiment"])}
        write_whole(pages / f"{paper}.md", _paper_page(paper, mine, folder, pages, page).encode())
        claims = [claim for same in mine.values() for claim in _claims(same)]
        words = [claim["word"] for claim in claims]
        explained = sum(claim["word"] == CONTRADICTED and bool(claim["evidence"]) for claim in claims)
        counts = [*(words.count(word) for word in WORDS), explained, words.count(NOT_RUN), len(words)]
        rows.append([f"[{paper}]({page.stem}/{paper}.md)", _title(paper), *map(str, counts)])
    total = [str(sum(int(row[k]) for row in rows)) for k in range(2, 8)]
    rows.append(["all", "", *total])
    columns = ["paper", "", *WORDS, EXPLAINED, NOT_RUN, "claims"]
    write_whole(page, "\n".join([HEAD, markdown(columns, rows)]).encode())


def _is_result(record: Mapping[str, Any]) -> bool:
    """A record of a preset that counts, in today's words: those of before had two."""
    return record.get("preset") in PRESETS and all("word" in claim for claim in record["claims"])


def _title(paper: str) -> str:
    return BY_KEY[paper].title if paper in BY_KEY else ""


def _order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Papers as in the bibliography; figures and tables by their numbers; the quick preset first."""
    keys = [paper.key for paper in PAPERS]
    place = keys.index(record["paper"]) if record["paper"] in keys else len(keys)
    name = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", record["experiment"])]
    return place, name, PRESETS.index(record["preset"]) if "preset" in record else -1


def _claims(records: Records) -> Records:
    """The claims of an experiment as its largest size answers them."""
    if "preset" not in records[0]:
        return [{"word": NOT_RUN} for _ in records[0]["claims"]]
    return list({claim["claim"]: claim for record in records for claim in record["claims"]}.values())


def _words(records: Records) -> list[str]:
    return [claim["word"] for claim in _claims(records)]


def _paper_page(paper: str, experiments: Mapping[str, Records], records: Path, pages: Path, overview: Path) -> str:
    words = [word for same in experiments.values() for word in _words(same)]
    counts = ", ".join(f"{words.count(word)} {word}" for word in (*WORDS, NOT_RUN) if words.count(word))
    parts = [f"# {paper}: {_title(paper)}\n" if _title(paper) else f"# {paper}\n"]
    parts.append(f"{len(words)} claims: {counts}. Back to the [overview](../{overview.name}).\n")
    rows = [
        [f"[{one}](#{one})", same[0]["title"], ", ".join(r["preset"] for r in same if "preset" in r) or NOT_RUN]
        + [str(_words(same).count(word) or "") for word in WORDS]
        for one, same in experiments.items()
    ]
    parts.append(markdown(["experiment", "", "run", *WORDS], rows))
    pictures = Path(os.path.relpath(records, pages))
    for one, same in experiments.items():
        parts.append(f"## {one}\n\n{same[0]['title']}.\n")
        if "preset" not in same[0]:
            parts.append(f"Not run. `mooring reproduce {one}` runs it.\n")
            continue
        parts += [_experiment(record, records, pictures) for record in same]
    return "\n".join(parts)


def _experiment(record: Mapping[str, Any], records: Path, pictures: Path) -> str:
    """One size: figure, claims, what is to be said of those that did not hold, and the rest folded away."""
    data = f" Data: {record['data']}." if record["data"] else ""
    repeats = "one repeat" if record["repeats"] == 1 else f"{record['repeats']} repeats"
    lines = [f"**{record['preset']}**: {repeats}, {_time(record['seconds'])} on one core.{data}\n"]
    name = f"{record['experiment']}-{record['preset']}"
    if (records / f"{name}.png").exists():
        lines.append(f"![{name}]({(pictures / name).as_posix()}.png)\n")
    rows = [[claim["says"], _bold(claim["word"]), key_number(claim["worst"])] for claim in record["claims"]]
    lines.append(markdown(["claim", "word", "decided by"], rows))
    lines += [_paragraph(claim) for claim in record["claims"] if claim["word"] != HELD]
    folded = [record["reads"] + "\n"] if record["reads"] else []
    folded += [table(one) for one in record["tables"]]
    folded += ["\n".join(f"- *{claim['claim']}*: {number(claim['numbers'])}" for claim in record["claims"]) + "\n"]
    folded += [_origin(record)]
    summary = f"<details><summary>{name}: how it was read, tables, all numbers</summary>\n"
    return "\n".join([*lines, summary, *folded, "</details>\n"])


def _bold(word: str) -> str:
    return word if word == HELD else f"**{word}**"


def _paragraph(claim: Mapping[str, Any]) -> str:
    """What is to be said of a claim that is open or contradicted."""
    where = f" at: {claim['where']}" if claim["where"] else ""
    text = f"*{claim['claim']}* is {claim['word']}{where}."
    if claim["word"] == OPEN:
        needs = claim["needs"]
        text += f" About {needs:,} repeats would decide." if needs and needs < 10_000 else ""
        text += f" {claim['note']}" if claim["note"] else ""
        return text + "\n"
    reason = claim["evidence"] or claim["note"] or "The reason is not known."
    return f"{text} {reason}\n"


def _origin(record: Mapping[str, Any]) -> str:
    """What a record rests on, as far as it says so."""
    made = record.get("made", {})
    versions = ", ".join(f"{name} {version}" for name, version in made.get("versions", {}).items())
    files = ", ".join(f"{name} {digest[:12]}" for name, digest in made.get("data", {}).items())
    parts = [f"Code {made['code'][:12]}" if "code" in made else "", versions, files]
    return "; ".join(part for part in parts if part) + ".\n"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
