"""The papers' figures, tables and theorems: reproduce, theorem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import RESUMABLE_RUNS, app, print_json
from mooring.commands.reference import LISTS, OF_PAPERS
from mooring.options import Json, add_options

LISTS[OF_PAPERS] = (
    "mooring_papers.base.catalog",
    "list_experiments",
    "describe_experiment",
    {"id": "experiment", "title": "what", "claims": "claims"},
)


@app.command(epilog="Example: mooring reproduce all --preset quick")
@add_options("data_dir")
def reproduce(
    what: Annotated[str, typer.Argument(hidden=True)],
    preset: Annotated[
        str,
        typer.Option("--preset", help="quick (minutes each) or paper (its own sizes). [quick]", show_default=False),
    ] = "quick",
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only these points: --only 'row=MNIST CNN2'.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", help="Number of repeats; other than the registered number, the run decides nothing."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where figures, tables and records go. [reproduction]", show_default=False)
    ] = Path("reproduction"),
    page: Annotated[Path | None, typer.Option("--page", help="Write a page on all records in --out.")] = None,
    json_: Json = False,
    **given: Any,
) -> None:
    """Reproduce figures and tables of the papers.

    Every claim is held, open or contradicted. Exit code 3 when one is contradicted, 4 when none is but some are open.

    WHAT is an experiment's id (`mooring list experiments`), a paper such as kernel, or all.
    """
    from mooring.report.terminal import Display
    from mooring.runs.directory import check_writable
    from mooring_papers.base import catalog, registry
    from mooring_papers.base.claims import CONTRADICTED, HELD
    from mooring_papers.base.records import list_outdated
    from mooring_papers.base.reproduce import list_claims
    from mooring_papers.base.reproduce import reproduce as run
    from mooring_papers.report.reproduction import draw_record, show_claims, write_page

    display = Display(json_)
    check_writable(out)
    RESUMABLE_RUNS[:] = ["trials that are done are kept: the same command resumes"]
    with display.progress() as on_progress:
        records = run(what, preset, out, only=only or (), repeats=repeats, on_progress=on_progress, **given)
    for record in records:
        draw_record(record, out)
    claims = list_claims(records)
    outdated: list[str] = []
    if page is not None:
        write_page(out, page, [registry.describe_registrations(paper) for paper in catalog.list_papers()])
        outdated = list_outdated(out)
    if json_:
        print_json({"claims": claims} | ({} if page is None else {"outdated": outdated}))
    else:
        show_claims(display, claims, preset, out)
        if outdated:
            display.paragraph(
                f"Records on the page whose trials have a newer version ({len(outdated)}): {', '.join(outdated)}."
            )
    words = {row["word"] for row in claims}
    if words != {HELD}:
        raise typer.Exit(3 if CONTRADICTED in words else 4)


@app.command(epilog="Example: mooring theorem alternative")
def theorem(
    name: Annotated[str | None, typer.Argument(hidden=True, metavar="NAME")] = None,
    given: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="QUANTITY=VALUE...")] = None,
    json_: Json = False,
) -> None:
    """List the papers' theorems, or evaluate one.

    Without NAME all are listed. With NAME, the quantities of the theorem are listed; with quantities, such as mu=0.5
    n=[20,30], its value is printed.
    """
    from mooring.report.terminal import Display
    from mooring_papers.theory import catalog

    display = Display(json_)
    if given and name:
        answer = catalog.evaluate(name, given)
        if json_:
            print_json(answer)
        else:
            display.table(
                name, [{"name": key, "value": part} for key, part in answer.items()], {"name": "", "value": ""}
            )
        return
    rows = catalog.describe(name)
    if json_:
        print_json({"theorems" if name is None else "statements": rows})
    else:
        display.table(name or "theorems", rows, {"name": "name", "says": "what", "asks": "quantities"})
