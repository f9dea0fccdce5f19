"""Write one table per client for `make federation`, and compare the federation's models with the simulator's.

python -m benchmarks.client_tables write parkinsons DIR 8     one table per client, and a run file
python -m benchmarks.client_tables compare DIR OUT            compare the federation's models with the simulator's
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from mooring.data.datasets import EMBEDDED_TABLES
from mooring.data.table_sources import read_source
from mooring.engines.fit import fit
from mooring.engines.request import request
from mooring.remote.client_node import run_digest
from mooring.remote.client_requests import RESULT_DIR
from mooring.remote.serve import server_folder
from mooring.runs.directory import open_run

ROUNDS = 20
CLOSE = 1e-12  # relative to the largest entry: another order of the same sums may cause this difference


def write(name: str, folder: Path, clients: int) -> None:
    """Write the rows of the largest clients, one file per client, without the client column."""
    table, declaration = read_source(name), EMBEDDED_TABLES[name]
    (folder / "tables").mkdir(parents=True)
    for client in table.frame[declaration.client].value_counts().index[:clients]:
        rows = table.frame[table.frame[declaration.client] == client].drop(columns=declaration.client)
        rows.to_csv(folder / "tables" / f"{client}.csv", index=False)
    (folder / "run.toml").write_text(
        f'[data]\nsource = "{(folder / "tables").resolve()}"\ntarget = "{declaration.target}"\n\n'
        f'[algorithm]\nname = "fedprox_personal"\n\n[training]\nrounds = {ROUNDS}\ncheckpoint = "last"\nthreads = 1\n'
    )


def compare(folder: Path, out: Path) -> tuple[float, float]:
    """Return the largest differences between a federation's models and the simulator's: global and personal."""
    path = folder / "run.toml"
    simulated, run = fit(path), request(path, purpose="fit")
    common = difference(open_run(out).models.common, simulated.trained.common)
    states = server_folder(out.resolve()) / "clients"
    personal_models = (
        open_run(states / name / run_digest(run) / RESULT_DIR).models.personal for name in simulated.models
    )
    return common, max(
        difference(model[0], expected) for model, expected in zip(personal_models, simulated.models.values())
    )


def difference(model: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest entry, or absolute if the expected model is 0."""
    return float((model - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


def main() -> int:
    command, *arguments = sys.argv[1:]
    if command == "write":
        write(arguments[0], Path(arguments[1]), int(arguments[2]))
        return 0
    common, personal = compare(Path(arguments[0]), Path(arguments[1]))
    print(f"Beside the simulator: the common model differs by {common:.1e} at most, personal ones by {personal:.1e}.")
    return 0 if max(common, personal) <= CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
