"""One table per client from an embedded data set, and a run file: `python -m benchmarks.client_tables heart DIR 4`.

What `make federation` runs: the tables are what clients would have on machines of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mooring.data.datasets import TABLES
from mooring.data.gather import gather

ROUNDS = 20


def write(name: str, folder: Path, clients: int) -> None:
    """The largest clients' rows, each in a file of its own, without the client column."""
    table, about = gather(name), TABLES[name]
    (folder / "tables").mkdir(parents=True)
    for who in table.frame[about.client].value_counts().index[:clients]:
        mine = table.frame[table.frame[about.client] == who].drop(columns=about.client)
        mine.to_csv(folder / "tables" / f"{who}.csv", index=False)
    (folder / "run.toml").write_text(
        f'[data]\nsource = "{(folder / "tables").resolve()}"\ntarget = "{about.target}"\n\n'
        f'[algorithm]\nname = "fedprox_one_stage"\n\n[training]\nrounds = {ROUNDS}\n'
    )


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
