"""Equal runs give equal bytes in every file but the seconds and the page that shows them, whatever the order."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.engines.export import export
from mooring.runs.atomic_files import csv_bytes, write_json
from mooring.runs.directory import SECONDS_FILE, open_run

TIMED = (SECONDS_FILE, "report.html")


def table(names, rows=12):
    rng = np.random.default_rng(0)
    each = {name: rng.normal(size=(rows, 2)) for name in sorted(names)}
    parts = [
        pd.DataFrame(x, columns=["a", "b"]).assign(who=name, y=x @ [1.0, -2.0] + 0.1 * k + rng.normal(size=rows))
        for k, (name, x) in enumerate(each.items())
    ]
    return pd.concat([{part["who"].iloc[0]: part for part in parts}[name] for name in names], ignore_index=True)


def files(run):
    return {
        str(f.relative_to(run)): f.read_bytes() for f in sorted(run.rglob("*")) if f.is_file() and f.name not in TIMED
    }


CODE = """
import sys, mooring
mooring.fit("rows.csv", client="who", target="y", algorithm="apfl", rounds=4, threads=1, out=sys.argv[1] + "/fit")
about = {"client": "who", "target": "y", "threads": 1}
mooring.compare("rows.csv", ["local", "fedavg"], rounds=3, out=sys.argv[1] + "/many", **about)
"""


ADVICE = """
import sys, mooring
from mooring.report.figures import draw_images
mooring.advise("rows.csv", client="who", target="y", threads=1, folds=2, out=sys.argv[1] + "/advice")
draw_images(sys.argv[1] + "/advice")
"""


def with_other_hash_seeds(folder, code, least):
    table(["c", "a", "b"]).to_csv(folder / "rows.csv", index=False)
    found = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", code, seed], check=True, cwd=folder, env=env)
        found.append(files(folder / seed))
    assert found[0].keys() == found[1].keys() and len(found[0]) >= least
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []


@pytest.mark.slow
def test_two_advices_with_other_hash_seeds(tmp_path):
    with_other_hash_seeds(tmp_path, ADVICE, 9)


def test_two_runs_with_other_hash_seeds(tmp_path):
    with_other_hash_seeds(tmp_path, CODE, 16)
    assert open_run(tmp_path / "1/fit").rounds["seconds"].gt(0).all()
    assert all(row["seconds"] > 0 for row in open_run(tmp_path / "1/many").comparison["methods"])


@pytest.mark.parametrize("algorithm", ["fedprox_personal", "scaffold"])
def test_the_order_of_clients_in_a_table_does_not_matter(algorithm):
    names = ["c", "a", "e", "b", "d"]
    found = [
        mooring.fit(table(order), client="who", target="y", algorithm=algorithm, rounds=4, participation=3, threads=1)
        for order in (names, sorted(names), names[::-1])
    ]
    for other in found[1:]:
        assert list(other.models) == list(found[0].models) == sorted(names)
        for name, model in found[0].models.items():
            assert model.equal(other.models[name])


def test_seconds_that_were_lost_or_damaged_stop_nothing(tmp_path):
    rows = table(list("abc"))
    mooring.fit(rows, client="who", target="y", algorithm="fedavg", rounds=3, threads=1, out=tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.rounds["seconds"].notna().all()
    write_json(run.path / SECONDS_FILE, {"rounds": [0.5, None]})
    assert run.rounds["seconds"].tolist()[0] == 0.5 and run.rounds["seconds"].isna().tolist() == [False, True, True]
    (run.path / SECONDS_FILE).unlink()
    assert run.rounds["seconds"].isna().all()


def test_no_text_is_a_formula_in_an_exported_table(tmp_path):
    evil = ["=1+1", "+a", "-b", "@c"]
    frame = table(evil)
    mooring.fit(frame, client="who", target="y", algorithm="local", rounds=1, threads=1, out=tmp_path / "run")
    cells = [line.split(",")[0] for line in export(tmp_path / "run")[0].decode().splitlines()[1:]]
    assert set(cells) == {"'" + name for name in evil}
    assert csv_bytes(pd.DataFrame({"=x": ["-2", "a", None], "n": [-1.5, 2, 3]})) == b"'=x,n\n-2,-1.5\na,2.0\n,3.0\n"
