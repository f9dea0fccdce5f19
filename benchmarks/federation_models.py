"""Every algorithm over real processes and TLS, beside the simulator: how far the models are apart.

    python -m benchmarks.federation_models [--clients 3] [--rounds 3] [--algorithms apfl,ditto]

Each algorithm that is not pooled runs a federation on this machine, `mooring federation up --embedded`; the largest
difference of the common model, and of any client's own, is told as a share of the largest entry.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import tomli_w

from benchmarks.client_tables import compare
from mooring.algorithms.base import find, names
from mooring.engines.flower import federation
from tests.algorithms.cases import CASES
from tests.engines.test_flower import write_clients


def settings_of(name: str) -> dict[str, object]:
    """Settings with which an algorithm's tests run a linear task."""
    return dict(next(fields for other, fields, problems in CASES if other == name and "linear" in problems))


def tried(name: str, folder: Path, clients: int, rounds: int) -> tuple[float, float]:
    """The differences of the common and of the personal models."""
    tables = write_clients(folder / "clients", clients=clients)
    run = {
        "data": {"source": str(tables), "target": "y"},
        "algorithm": {"name": name, **settings_of(name)},
        "training": {"rounds": rounds, "threads": 1},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    federation.up(folder / "run.toml", tables, folder / "out", embedded=True, say=lambda sentence: None)
    return compare(folder, folder / "out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--algorithms")
    asked = parser.parse_args()
    chosen = asked.algorithms.split(",") if asked.algorithms else [name for name in names() if not find(name).pooled]
    print("| algorithm | common model | personal models | seconds |\n|---|---|---|---|", flush=True)
    for name in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="federation-") as folder:
            common, personal = tried(name, Path(folder), asked.clients, asked.rounds)
        print(f"| {name} | {common:.1e} | {personal:.1e} | {time.monotonic() - begun:.0f} |", flush=True)


if __name__ == "__main__":
    main()
