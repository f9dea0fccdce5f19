"""What `make federation` runs before and after the federation itself.

python -m benchmarks.client_tables write parkinsons DIR 8     one table per client, and a run file
python -m benchmarks.client_tables compare DIR OUT            the federation's models beside the simulator's
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from mooring.data.datasets import EMBEDDED_TABLES
from mooring.data.table_sources import read_source
from mooring.engines.fit import fit
from mooring.engines.flower.client_node import run_digest
from mooring.engines.flower.client_requests import RESULT_DIR
from mooring.engines.flower.federation import server_folder
from mooring.engines.request import request
from mooring.runs.directory import open_run

ROUNDS = 20
CLOSE = 1e-12  # of the largest entry: what another order of the same sums may make


def write(name: str, folder: Path, clients: int) -> None:
    """The largest clients' rows, each in a file of its own, without the client column."""
    table, about = read_source(name), EMBEDDED_TABLES[name]
    (folder / "tables").mkdir(parents=True)
    for who in table.frame[about.client].value_counts().index[:clients]:
        mine = table.frame[table.frame[about.client] == who].drop(columns=about.client)
        mine.to_csv(folder / "tables" / f"{who}.csv", index=False)
    (folder / "run.toml").write_text(
        f'[data]\nsource = "{(folder / "tables").resolve()}"\ntarget = "{about.target}"\n\n'
        f'[algorithm]\nname = "fedprox_personal"\n\n[training]\nrounds = {ROUNDS}\ncheckpoint = "last"\nthreads = 1\n'
    )


def compare(folder: Path, out: Path) -> tuple[float, float]:
    """The largest differences between a federation's models and the simulator's: common, and personal."""
    path = folder / "run.toml"
    here, run = fit(path), request(path, purpose="fit")
    common = difference(open_run(out).models.common, here.trained.common)
    states = server_folder(out.resolve()) / "clients"
    own = (open_run(states / name / run_digest(run) / RESULT_DIR).models.personal for name in here.models)
    return common, max(difference(one[0], right) for one, right in zip(own, here.models.values()))


def difference(found: Tensor, right: Tensor) -> float:
    """The largest, as a share of the largest entry; of a model that is 0 everywhere, itself."""
    return float((found - right).abs().max()) / (float(right.abs().max()) or 1.0)


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "write":
        write(rest[0], Path(rest[1]), int(rest[2]))
        return 0
    common, personal = compare(Path(rest[0]), Path(rest[1]))
    print(f"Beside the simulator: the common model differs by {common:.1e} at most, personal ones by {personal:.1e}.")
    return 0 if max(common, personal) <= CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
