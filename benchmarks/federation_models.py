"""Every algorithm over real processes and TLS, beside the simulator: how far the models are apart.

    python -m benchmarks.federation_models [--clients 3] [--rounds 3] [--only apfl,ditto,parkinsons]

Each algorithm that is not pooled runs a federation on this machine (`mooring serve`, a `mooring join --embedded` for
each client); the largest difference of the common model, and of any client's own, is told as a share of the largest
entry. Then advice on a regression table (`parkinsons`) and on one of two classes (`heart`): beside the differences, how
many verdicts are the same. Commands are forked, so that Python and its modules are not loaded for each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import tomli_w

from benchmarks.client_tables import compare, difference
from mooring.advice.advise import advise
from mooring.algorithms.base import algorithm_names, find
from mooring.engines.flower.client_node import run_digest
from mooring.engines.flower.client_requests import RESULT_DIR
from mooring.engines.flower.federation import server_folder
from mooring.engines.request import read_federation_request
from mooring.runs.directory import open_run
from tests.advice.test_remote_server import CASES as TABLES
from tests.advice.test_remote_server import WORDS, write_case
from tests.algorithms.cases import CASES
from tests.engines.processes import LONG, Federation, wait_until
from tests.engines.test_flower import write_clients


def settings_of(name: str) -> dict[str, object]:
    """Settings with which an algorithm's tests run a linear task."""
    return dict(next(fields for other, fields, problems in CASES if other == name and "linear" in problems))


def run_to_its_end(folder: Path, path: Path, tables: Path) -> Path:
    """The run directory of a federation of processes."""
    with Federation(folder, path, tables) as here:
        for who in ("server", *here.names):
            wait_until(lambda who=who: here.alive[who].poll() is not None, 3 * LONG)
            if here.alive[who].poll():
                raise RuntimeError(f"{who} failed: {here.said(who)[-500:]}")
        return here.out


def fitted(name: str, folder: Path, clients: int, rounds: int) -> tuple[float, float, str]:
    """The differences of the common and of the personal models."""
    tables = write_clients(folder / "clients", clients=clients)
    run = {
        "data": {"source": str(tables), "target": "y"},
        "algorithm": {"name": name, **settings_of(name)},
        "training": {"rounds": rounds, "threads": 1},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    return *compare(folder, run_to_its_end(folder, folder / "run.toml", tables)), ""


def advised(name: str, folder: Path) -> tuple[float, float, str]:
    """The differences of the common model and of those that clients are told to deploy, and of the verdicts."""
    path = write_case(name, folder)
    out = run_to_its_end(folder, path, folder / "clients")
    here, there, digest = advise(path), open_run(out), run_digest(read_federation_request(path))
    rows = {row["client"]: row for row in there.advice["clients"]}
    same = sum(all(rows[row["client"]][word] == row[word] for word in WORDS) for _, row in here.clients.iterrows())
    folders = (server_folder(out) / "clients" / client / digest / RESULT_DIR for client in here.clients["client"])
    own = (open_run(folder).models.personal[0] for folder in folders)
    personal = max(difference(one, right) for one, right in zip(own, here.models.deployed))
    common = difference(there.models.common, here.models.common)
    return common, personal, f"{same} of {len(rows)} verdicts, headline {there.advice['headline'] == here.headline}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only")
    asked = parser.parse_args()
    every = [*(name for name in algorithm_names() if not find(name).pooled), *TABLES]
    print("| | common model | personal models | the same | seconds |\n|---|---|---|---|---|", flush=True)
    for name in asked.only.split(",") if asked.only else every:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="federation-") as place:
            folder = Path(place)
            found = advised(name, folder) if name in TABLES else fitted(name, folder, asked.clients, asked.rounds)
        common, personal, same = found
        print(f"| {name} | {common:.1e} | {personal:.1e} | {same} | {time.monotonic() - begun:.0f} |", flush=True)


if __name__ == "__main__":
    main()
