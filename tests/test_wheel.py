"""The wheel as others install it: freely licensed data only, and it works in an environment of its own.

The second test installs everything that the package needs into a new environment: minutes, and a package index.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
OURS = {"flights.csv", "heart.csv", "parkinsons.csv", "penguins.csv"}  # CC0 or CC BY 4.0, see mooring/data/embedded/NOTICE
pytestmark = pytest.mark.slow


def done(*words, **how):
    made = subprocess.run([str(word) for word in words], capture_output=True, text=True, **how)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the working tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HERE / name, copy)
    shutil.copytree(HERE / "mooring", copy / "mooring", ignore=shutil.ignore_patterns("__pycache__"))
    done(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, copy)
    (found,) = out.glob("mooring_fl-*.whl")
    return found


def test_it_holds_freely_licensed_data_only(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (about,) = [packed.read(name).decode() for name in names if name.endswith("/METADATA")]
        notice = packed.read("mooring/data/embedded/NOTICE").decode()
    known = (
        ".py",
        ".typed",
        ".css",
        ".js",
        ".html",
        "NOTICE",
        "LICENSE",
        "METADATA",
        "WHEEL",
        "RECORD",
        ".txt",
        ".toml",
    )
    data = {Path(name).name for name in names if not name.endswith(known)}
    assert data == OURS and all(name in notice for name in OURS) and "CC BY 4.0" in notice
    assert "License-Expression: Apache-2.0 AND CC-BY-4.0" in about and "GPL" not in about + notice
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_it_works_in_an_environment_of_its_own(wheel, tmp_path):
    done(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    done(python, "-m", "pip", "install", "--quiet", "--constraint", HERE / "constraints.txt", wheel)
    empty = tmp_path / "empty"
    empty.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    said = done(tmp_path / "venv" / "bin" / "mooring", "advise", "heart", cwd=empty, env=clean)
    assert "heart: 4 clients, 920 rows." in said and "Report: runs/heart-advice-1/report.html" in said
    assert (empty / "runs/heart-advice-1/report.html").stat().st_size > 10_000
    where = done(python, "-c", "import mooring; print(mooring.__file__)", cwd=empty, env=clean)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
