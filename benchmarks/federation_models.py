"""Every algorithm over processes and TLS, compared with the simulator: the difference of the models.

    python -m benchmarks.federation_models [--clients 3] [--rounds 3] [--only apfl,ditto,parkinsons]

Each algorithm that is not pooled runs a federation on this machine (`mooring serve`, one `mooring join` per
client); the largest difference of the global model, and of any client's personal one, is printed relative to the
largest entry. Then advice on a regression table (`parkinsons`) and on one of two classes (`heart`): the differences,
and how many recommendations are equal. Commands are forked, so that Python and its modules are not loaded for each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import tomli_w
from tests.advice.test_remote_server import CASES as TABLES
from tests.advice.test_remote_server import WORDS, write_case

from benchmarks.client_tables import compare, difference
from mooring.advice.advise import advise
from mooring.algorithms.base import algorithm_names, find
from mooring.engines.request import read_federation_request
from mooring.remote.client_node import run_digest
from mooring.remote.client_requests import RESULT_DIR
from mooring.remote.serve import server_folder
from mooring.runs.directory import open_run
from tests.algorithms.cases import CASES
from tests.remote.federation_runs import write_clients
from tests.remote.processes import LONG, Federation, wait_until


def settings_of(name: str) -> dict[str, object]:
    """Return the hyperparameters with which an algorithm's tests run a linear task."""
    return dict(next(fields for algorithm, fields, problems in CASES if algorithm == name and "linear" in problems))


def run_federation(folder: Path, path: Path, tables: Path) -> Path:
    """Run a federation of processes to its end and return its run directory."""
    with Federation(folder, path, tables) as federation:
        for process in ("server", *federation.names):
            wait_until(lambda process=process: federation.alive[process].poll() is not None, 3 * LONG)
            if federation.alive[process].poll():
                raise RuntimeError(f"{process} failed: {federation.said(process)[-500:]}")
        return federation.out


def compare_fit(name: str, folder: Path, clients: int, rounds: int) -> tuple[float, float, str]:
    """Return the differences of the global and of the personal models."""
    tables = write_clients(folder / "clients", clients=clients)
    run = {
        "data": {"source": str(tables), "target": "y"},
        "algorithm": {"name": name, **settings_of(name)},
        "training": {"rounds": rounds, "threads": 1},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    return *compare(folder, run_federation(folder, folder / "run.toml", tables)), ""


def compare_advice(name: str, folder: Path) -> tuple[float, float, str]:
    """Return the differences of the global and of the recommended models, and the number of equal recommendations."""
    path = write_case(name, folder)
    out = run_federation(folder, path, folder / "clients")
    simulated, federated, digest = advise(path), open_run(out), run_digest(read_federation_request(path))
    rows = {row["client"]: row for row in federated.advice["clients"]}
    equal_count = sum(
        all(rows[row["client"]][column] == row[column] for column in WORDS) for _, row in simulated.clients.iterrows()
    )
    folders = (server_folder(out) / "clients" / client / digest / RESULT_DIR for client in simulated.clients["client"])
    personal_models = (open_run(folder).models.personal[0] for folder in folders)
    personal = max(
        difference(model, expected) for model, expected in zip(personal_models, simulated.models.recommended)
    )
    common = difference(federated.models.common, simulated.models.global_)
    return (
        common,
        personal,
        f"{equal_count} of {len(rows)} verdicts, headline {federated.advice['headline'] == simulated.headline}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only")
    options = parser.parse_args()
    names = [*(name for name in algorithm_names() if not find(name).pooled), *TABLES]
    print("| | common model | personal models | the same | seconds |\n|---|---|---|---|---|", flush=True)
    for name in options.only.split(",") if options.only else names:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="federation-") as place:
            folder = Path(place)
            differences = (
                compare_advice(name, folder)
                if name in TABLES
                else compare_fit(name, folder, options.clients, options.rounds)
            )
        common, personal, equal_text = differences
        print(f"| {name} | {common:.1e} | {personal:.1e} | {equal_text} | {time.monotonic() - begin:.0f} |", flush=True)


if __name__ == "__main__":
    main()
