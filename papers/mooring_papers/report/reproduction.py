"""Pages on the reproduced papers: an overview and one page per paper, from records and registrations."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from mooring.core.errors import RequestError
from mooring.core.natural_order import natural_key
from mooring.core.papers import BY_KEY, PAPERS
from mooring.core.types import JsonObject, NamedValues
from mooring.report.terminal import Display
from mooring.runs.atomic_files import make_synced_folder, read_json, write_atomically
from mooring_papers.report.markdown import (
    format_brief,
    format_key_number,
    format_number,
    format_record_table,
    format_table,
)

HEAD = """# Reproduction of the papers

Sentences of the papers are registered as claims before the run that decides them. The quotation, the test with its
threshold, the data, clients, rounds, repeats and seeds are in `papers/mooring_papers/<paper>/claims.toml`. A
registration changes only as a new version with a reason. The verdicts:

- **held**: the whole 95% interval (Student t over repeats of paired differences) is on the paper's side of the
  threshold;
- **contradicted**: the whole interval is on the other side;
- **open**: neither;
- **not run**: the data or the compute were not available.

"Almost the same", "around", "negligible" and similar words mean within 10% if the paper prints no errors, "linear" a
squared correlation of at least 0.95. The data are the *paper's data* (including its generators), *part of it*, or a
*stand-in*; a run on stand-in data is a smoke test and never *held*. A record keeps the verdicts of the version that
made it, which the papers' pages state. `mooring reproduce ID --preset ...` repeats an experiment with the installed
version, and `mooring reproduce ... --page` writes these pages from the records. Results from before the registration
are folded on the papers' pages. `mooring cite KEY` prints the reference of a paper.
"""
HISTORY = "history.json"  # results from before the registration
HELD, CONTRADICTED, OPEN = DECIDED = ("held", "contradicted", "open")
NOT_RUN, SMOKE_TEST = "not run", "smoke test"
WORDS = (*DECIDED, NOT_RUN)
STAND_IN = "stand-in"
TEN_REPEATS_SECONDS, FIVE_REPEATS_SECONDS = 30 * 60, 2 * 3600  # longest runs with ten and with five repeats

Records = Sequence[NamedValues]


def title(record: NamedValues) -> str:
    """Return the experiment's title, with its data if they are not the paper's."""
    return f"{record['experiment']}: {record['title']}" + (f" (data: {record['data']})" if record["data"] else "")


def draw_record(record: NamedValues, folder: str | Path) -> None:
    """Write the figure and the tables of a record into its folder."""
    from mooring_papers.report.experiment_figures import draw_panels

    name = Path(folder) / f"{record['experiment']}-{record['preset']}"
    if record["panels"]:
        for ending, data in draw_panels(title(record), record["panels"]).items():
            write_atomically(f"{name}.{ending}", data)
    if record["tables"]:
        parts = [f"# {title(record)}", *(format_record_table(table) for table in record["tables"])]
        write_atomically(f"{name}.md", "\n\n".join(parts).encode())


def show_claims(display: Display, claims: Records, preset: str, folder: str | Path) -> None:
    """Print the claims of the selected experiments."""
    rows = [{**row, "worst": format_brief(dict(row["worst"]))} for row in claims]
    columns = {"experiment": "experiment", "says": "claim", "word": "", "worst": "decided by"}
    counts = ", ".join(f"{sum(row['word'] == verdict for row in claims)} {verdict}" for verdict in DECIDED)
    heading = f"{len(claims)} claims, preset {preset}: {counts}"
    if any(row["registration"] is None for row in claims):
        heading += " (not the registered run: it decides nothing)"
    display.table(heading, rows, columns, f"Figures and tables: {folder}", spare=("worst",))


def write_page(records: str | Path, page: str | Path, papers: Records) -> None:
    """Write the overview and, in a folder with its name, one page per paper, from all records in a folder.

    `papers` are the registrations as plain data (`registry.describe_registrations`), one entry per paper.
    """
    folder, page = Path(records), Path(page)
    known_records = [read_json(path) for path in sorted(folder.glob("*.json")) if path.name != HISTORY]
    if not known_records and not (folder / HISTORY).exists():
        raise RequestError(f"{folder} holds no record of an experiment; run `mooring reproduce all --out {folder}`.")
    answers = {
        claim["registration"]: (record, claim)
        for record in known_records
        for claim in record["claims"]
        if claim.get("registration")
    }
    past = read_json(folder / HISTORY)["results"] if (folder / HISTORY).exists() else []
    pages = page.parent / page.stem
    make_synced_folder(pages.absolute())
    keys = [paper.key for paper in PAPERS]
    ordered = sorted(
        papers,
        key=lambda registrations: keys.index(registrations["paper"]) if registrations["paper"] in keys else len(keys),
    )
    decided = [_list_decided(registrations, answers) for registrations in ordered]
    for registrations, claims in zip(ordered, decided):
        past_results = [row for row in past if row["experiment"].split("-")[0] == registrations["paper"]]
        text = _paper_page(registrations, claims, past_results, folder, pages, page)
        write_atomically(pages / f"{registrations['paper']}.md", text.encode())
    write_atomically(pages / "not-run.md", _claims_not_run(decided).encode())
    write_atomically(page, _overview(ordered, decided, page).encode())


def _list_decided(
    registrations: NamedValues, answers: Mapping[str, tuple[NamedValues, NamedValues]]
) -> list[JsonObject]:
    """Return the newest version of each claim, with its verdict and the record that decides it."""
    claims = []
    for claim in registrations["claims"]:
        if not claim["current"]:
            continue
        record, answer = answers.get(claim["digest"], (None, None))
        verdict = NOT_RUN if answer is None else answer["word"]
        if answer is not None and claim["label"] == STAND_IN:
            verdict = SMOKE_TEST
        claims.append({**claim, "word": verdict, "record": record, "answer": answer})
    return claims


def _overview(papers: Records, decided: Sequence[Records], page: Path) -> str:
    """Return the overview: counts by paper, data and verdict, and a conclusion per paper."""
    everything = [claim for claims in decided for claim in claims]
    on_papers_data = [claim for claim in everything if claim["label"] != STAND_IN]
    answered = [claim for claim in on_papers_data if claim["word"] in DECIDED]
    count = Counter(claim["word"] for claim in answered)
    head = (
        f"Of {len(on_papers_data)} registered claims on the papers' data or part of it, {len(answered)} have been run: "
        f"{count[HELD]} held, {count[CONTRADICTED]} contradicted, {count[OPEN]} open.\n"
    )
    rows = [
        [f"[{entry['paper']}]({page.stem}/{entry['paper']}.md)", _title(entry["paper"]), *_counts(claims)]
        for entry, claims in zip(papers, decided)
    ]
    rows.append(["all", "", *_counts(everything)])
    labels = sorted({claim["label"] for claim in everything})
    groups = [(entry["paper"], claims) for entry, claims in zip(papers, decided)] + [("all", everything)]
    by_label = [
        [paper, label, *_counts(part)]
        for paper, claims in groups
        for label in labels
        if (part := [claim for claim in claims if claim["label"] == label])
    ]
    believe = [f"- **{entry['paper']}**: {entry['believe']}" for entry in papers if entry["believe"]]
    parts = [HEAD, head, format_table(["paper", "", *WORDS, "claims"], rows)]
    parts += ["By paper and data:\n", format_table(["paper", "data", *WORDS, "claims"], by_label)]
    if believe:
        parts += ["## Conclusions\n", "\n".join(believe) + "\n"]
    parts.append(f"What the other claims would take: [Claims that are not run]({page.stem}/not-run.md).\n")
    return "\n".join(parts)


def _claims_not_run(decided: Sequence[Records]) -> str:
    """Return the page of claims without a result: their data, and what a run takes."""
    waiting = [claim for claims in decided for claim in claims if claim["word"] == NOT_RUN]
    rows = [
        [f"[{key}]({key.split('-')[0]}.md#{key})", str(len(claims)), claims[0]["data"], _missing(claims[0])]
        for (key, _), group in groupby(waiting, key=lambda claim: (claim["experiment"], claim["data"]))
        if (claims := list(group))
    ]
    table = format_table(["experiment", "claims", "data", "what a run takes"], rows) if rows else "None.\n"
    return f"# Claims that are not run\n\n{table}"


def _counts(claims: Records) -> list[str]:
    verdicts = [claim["word"] for claim in claims]
    return [*(str(verdicts.count(verdict)) for verdict in WORDS), str(len(verdicts))]


def _missing(claim: NamedValues) -> str:
    size = f"{claim['repeats']} repeats at preset `{claim['preset']}`"
    return " ".join(
        filter(None, [claim["not_run"], f"A run takes {claim['takes']}." if claim["takes"] else size + "."])
    )


def _title(paper: str) -> str:
    return BY_KEY[paper].title if paper in BY_KEY else ""


def _paper_page(
    registrations: NamedValues, claims: Records, past: Records, records: Path, pages: Path, overview: Path
) -> str:
    paper = registrations["paper"]
    parts = [f"# {paper}: {_title(paper)}\n" if _title(paper) else f"# {paper}\n"]
    verdict_counts = Counter(claim["word"] for claim in claims)
    counts_text = ", ".join(
        f"{verdict_counts[verdict]} {verdict}" for verdict in (*WORDS, SMOKE_TEST) if verdict_counts[verdict]
    )
    parts.append(f"{len(claims)} claims: {counts_text}. Back to the [overview](../{overview.name}).\n")
    if registrations["believe"]:
        parts.append(registrations["believe"] + "\n")
    by_experiment: dict[str, list[NamedValues]] = {}
    for claim in claims:
        by_experiment.setdefault(claim["experiment"], []).append(claim)
    pictures = Path(os.path.relpath(records, pages))
    for experiment in sorted(by_experiment, key=natural_key):
        past_results = [row for row in past if row["experiment"] == experiment]
        older = [
            claim for claim in registrations["claims"] if claim["experiment"] == experiment and not claim["current"]
        ]
        parts.append(_experiment(experiment, by_experiment[experiment], older, past_results, records, pictures))
    removed = [row for row in past if row["experiment"] not in by_experiment]
    if removed:
        parts.append("## Removed experiments\n\n" + _fold("their results", _history(removed)))
    return "\n".join(parts)


def _experiment(experiment: str, claims: Records, older: Records, past: Records, records: Path, pictures: Path) -> str:
    """Return the section of an experiment: its run, figure and claims, explanations, and folded details."""
    title = next((claim["title"] for claim in claims if claim["title"]), "")
    lines = [f"## {experiment}\n", f"{title}.\n" if title else ""]
    for record in _records(claims):
        name = f"{record['experiment']}-{record['preset']}"
        repeats = f"{record['repeats']} repeats" if record["repeats"] > 1 else "one repeat"
        version = record["made"].get("version", "")
        lines.append(f"Run: {repeats}, {_time(record['seconds'])} on one core, made by version {version}.\n")
        if (records / f"{name}.png").exists():
            lines.append(f"![{name}]({(pictures / name).as_posix()}.png)\n")
    rows = [
        [f"\"{_cell(claim['quote'])}\" ({claim['place']})", claim["test"], _bold(claim["word"]), _number(claim),
         f"{claim['data']} (*{claim['label']}*)"]
        for claim in claims
    ]  # fmt: skip
    lines.append(format_table(["the paper", "test", "verdict", "decided by", "data"], rows))
    lines += [_paragraph(claim) for claim in claims if claim["word"] in (CONTRADICTED, OPEN)]
    for record in _records(claims):
        folded = [record["reads"] + "\n"] if record["reads"] else []
        folded += [format_record_table(part) for part in record["tables"]]
        folded += [
            "\n".join(f"- *{claim['claim']}*: {format_number(claim['numbers'])}" for claim in record["claims"]) + "\n",
            _origin(record),
        ]
        lines.append(_fold("interpretation, tables, all numbers", "\n".join(folded)))
    if older:
        version_rows = [[claim["id"], str(claim["version"]), claim["test"], claim["reason"]] for claim in older]
        lines.append(_fold("older versions", format_table(["claim", "version", "test", "reason"], version_rows)))
    if past:
        lines.append(_fold("results from before the registration, which decide nothing", _history(past)))
    return "\n".join(line for line in lines if line)


def _records(claims: Records) -> list[NamedValues]:
    """Return the records that decide some of the claims, without duplicates."""
    return list({id(claim["record"]): claim["record"] for claim in claims if claim["record"]}.values())


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _fold(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n</details>\n"


def _history(rows: Iterable[NamedValues]) -> str:
    result_rows = [
        [f"{row['date']} {row['commit']}", row["claim"], row["says"], row["word"], row["decided by"],
         f"{row['preset']}, {row['repeats']} repeats" + (f"; {row['data']}" if row["data"] else "")]
        for row in rows
    ]  # fmt: skip
    return format_table(["committed", "claim", "wording then", "answer then", "decided by", "run"], result_rows)


def _number(claim: NamedValues) -> str:
    if claim["answer"] is None:
        return claim["not_run"]
    return format_key_number(claim["answer"]["worst"])


def _bold(verdict: str) -> str:
    return verdict if verdict == HELD else f"**{verdict}**"


def _paragraph(claim: NamedValues) -> str:
    """Return the explanation of an open or contradicted claim."""
    answer, record = claim["answer"], claim["record"]
    location = f" at: {answer['where']}" if answer["where"] else ""
    text = f"*{claim['id']}* is {claim['word']}{location}."
    explanation = " ".join(filter(None, [answer["note"], answer["evidence"], claim["tried"]]))
    if claim["word"] == CONTRADICTED:
        return f"{text} {explanation or 'The reason is not known, and nothing else was tried.'}\n"
    needed_repeats = answer["needs"]
    text += (
        f" About {needed_repeats:,} repeats would decide it at the same means."
        if needed_repeats and needed_repeats < 10_000
        else ""
    )
    granted = granted_repeats(record["seconds"] / record["repeats"])
    text += f" The protocol grants {granted} repeats to a run of this length, and this run has {record['repeats']}"
    text += "; more would be a new version at a stricter level." if record["repeats"] >= granted else "."
    return f"{text} {explanation}".strip() + "\n"


def granted_repeats(seconds: float) -> int:
    """Return the repeats granted if a repeat takes `seconds`: 10 for runs of minutes, 5 for up to two hours, else 3."""
    if 10 * seconds <= TEN_REPEATS_SECONDS:
        return 10
    return 5 if 5 * seconds <= FIVE_REPEATS_SECONDS else 3


def _origin(record: NamedValues) -> str:
    """Return the version of the trials or, in earlier records, the digest of the code, library versions and data."""
    origin = record.get("made", {})
    versions = ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items())
    files = ", ".join(f"{name} {digest[:12]}" for name, digest in origin.get("data", {}).items())
    code = f"Code {origin['code'][:12]}" if "code" in origin else f"Version {origin.get('trials', 1)} of the trials"
    parts = [code, versions, files]
    return "; ".join(part for part in parts if part) + ".\n"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
