"""Share of small mistakes in the algorithms that the tests notice.

    python -m benchmarks.mutants --sample 80 --seed 0            a random sample over algorithms/ and core/
    python -m benchmarks.mutants --listed                        the mistakes that once went unnoticed

A mutant is a copy of the package with one mistake: an operator exchanged (+ and -, * and /, < and <=, max and min), a
factor or a summand dropped, a number changed, a condition negated. The tests that concern the file run on it and stop
at the first failure, or at the time limit, which counts as noticed (an endless loop is noticed). Survivors are
printed with their line.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pandas  # noqa: F401  loaded once, for all children
import pytest
import scipy.optimize  # noqa: F401
import torch

ROOT = Path(__file__).parent.parent
FOLDERS = ("mooring/algorithms", "mooring/core")
SECONDS = 240  # of processor time, for one mutant's tests
NOTHING_TO_RUN = 5  # pytest's code when no test was selected
ALGORITHMS = [
    f"tests/algorithms/test_{name}.py" for name in ("settings", "equations", "promises", "two_stage", "limits", "apfl")
]
CORE = {
    "kinks": ["tests/core/test_nonsmooth.py", "tests/tasks/test_linear_score.py"],
    "newton": ["tests/core/test_solvers.py", "tests/tasks/test_convex.py"],
    "costs": ["tests/engines/test_loop.py"],
}
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {
    "max": "min",
    "min": "max",
    "sqrt": "abs",
    "any": "all",
    "all": "any",
    "clients": "cohort",
    "cohort": "clients",
}


class Mutant(NamedTuple):
    file: str
    line: int
    description: str
    make: Callable[[], str]  # returns the file's text with the mistake


LISTED = [  # file, the present text, the mistake
    ("algorithms/fedavg.py", "step = step * total", "step = step * 1"),
    ("algorithms/fedprox_personal.py", "step * (round.clients / round.cohort * round.weight)", "step * round.weight"),
    ("algorithms/fedprox_personal.py", "(round.clients / round.cohort * round.weight)", "1"),
    ("algorithms/fedprox.py", "self.lam * sqrt(round.rounds)", "self.lam * round.rounds"),
    ("algorithms/fedmspp.py", "self.lam * sqrt(round.rounds)", "self.lam * round.rounds"),
    ("algorithms/fedprox.py", "self.lam / 3, round.cohort", "self.lam / 3, round.clients"),
    ("algorithms/fedmspp.py", "self.lam / 8, round.cohort", "self.lam / 8, round.clients"),
    ("algorithms/fedprox_personal.py", 'share = 1.0 if algorithm.inner == "exact" else 0.5', "share = 1.0"),
    ("estimates/lambda_rules.py", "lambda_ier(radii.most", "lambda_ier(radii.rms"),
]


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of one file."""
    tree = ast.parse(path.read_text())
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    hints = {id(part) for n in ast.walk(tree) for part in ast.walk(getattr(n, "annotation", None) or ast.Pass())}
    hints |= {id(part) for n in ast.walk(tree) for d in getattr(n, "decorator_list", []) for part in ast.walk(d)}
    hints |= {id(part) for n in ast.walk(tree) if isinstance(n, ast.Raise) for part in ast.walk(n)}  # error messages
    for i, node in enumerate(ast.walk(tree)):
        if id(node) in docs | hints:
            continue
        for description, change in changes(node):

            def make(i: int = i, change: Any = change) -> str:
                twin = copy.deepcopy(tree)
                change(next(islice(ast.walk(twin), i, None)))
                return ast.unparse(twin)

            yield Mutant(str(path.relative_to(ROOT)), getattr(node, "lineno", 0), description, make)


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield (description, change) of every mistake that one node allows; `change` modifies a copy of the node in
    place."""
    source = ast.unparse(node)[:70] if isinstance(node, ast.expr) else type(node).__name__

    def swap(field: str, new: Any) -> Any:
        return lambda twin: setattr(twin, field, new)

    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not isinstance(node.op, ast.BitOr):
        yield (
            f"{source}: {type(node.op).__name__} -> {SWAPS[type(node.op)].__name__}",
            swap("op", SWAPS[type(node.op)]()),
        )
        if isinstance(node.op, ast.Mult | ast.Div | ast.Add | ast.Sub):
            neutral = ast.Constant(0 if isinstance(node.op, ast.Add | ast.Sub) else 1)
            yield f"{source}: the right side dropped", swap("right", neutral)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        new = SWAPS[type(node.ops[0])]
        yield f"{source}: {type(node.ops[0]).__name__} -> {new.__name__}", swap("ops", [new()])
    elif isinstance(node, ast.BoolOp):
        yield f"{source}: {type(node.op).__name__} swapped", swap("op", SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield f"{source}: the sign dropped", swap("op", ast.UAdd())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield f"{source}: + 1", swap("value", node.value + 1)
        if node.value not in (0, 1):
            yield f"{source}: doubled", swap("value", node.value * 2)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{source}: negated", swap("value", not node.value)
    elif isinstance(node, ast.IfExp):
        yield f"{source}: always the first", swap("test", ast.Constant(True))
        yield f"{source}: always the second", swap("test", ast.Constant(False))
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield f"{source}: {node.attr} -> {NAMES[node.attr]}", swap("attr", NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield f"{source}: {node.id} -> {NAMES[node.id]}", swap("id", NAMES[node.id])


def list_known_mutants() -> list[Mutant]:
    out = []
    for file, right, wrong in LISTED:
        text = (ROOT / "mooring" / file).read_text()
        if text.count(right) < 1:
            raise SystemExit(
                f"mooring/{file} no longer contains {right!r}; the list in benchmarks/mutants.py must follow."
            )
        line = text[: text.index(right)].count("\n") + 1
        out.append(Mutant(f"mooring/{file}", line, f"{right} -> {wrong}", partial(text.replace, right, wrong, 1)))
    return out


def select_tests(file: str, quick: bool) -> list[list[str]]:
    """Return lists of tests, to be run in turn until one fails: those that name the file, then all that concern it."""
    package, stem = Path(file).parent.name, Path(file).stem
    if package == "core":
        own_tests = CORE.get(stem, ["tests/core"])
        return [own_tests, [*ALGORITHMS, "-k", "not kernel"]]
    name_filter = "" if "kernel" in stem or stem in ("base", "settings") else " and not kernel"
    own_tests = sorted(
        str(f.relative_to(ROOT)) for f in (ROOT / "tests/algorithms").glob(f"test_*{stem.split('_')[0]}*.py")
    )
    select = ["-k", name_filter[5:]] if name_filter else []
    selections = [[*ALGORITHMS, "-k", stem + name_filter], [*own_tests, *ALGORITHMS, *select]]
    return selections if quick else [*selections, ["tests/algorithms", *select]]


def survives(mutant: Mutant, place: Path, quick: bool) -> bool:
    """Return whether all tests that concern the file pass on the mutant."""
    target = place / mutant.file
    right = target.read_text()
    target.write_text(mutant.make())
    try:
        return all(passes(tests, place) for tests in select_tests(mutant.file, quick))
    finally:
        target.write_text(right)


def passes(tests: list[str], place: Path) -> bool:
    """Return whether the tests pass in a child process, which inherits torch and pytest but not the package."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] in (0, NOTHING_TO_RUN << 8)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    os.chdir(place)
    sys.path.insert(0, str(place))
    sys.dont_write_bytecode = True
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    code = 1
    try:  # nothing may escape: the parent's temporary folder would be cleared here
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]))
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--after", type=int, default=0, help="skip this number of the sample, to resume an interrupted run"
    )
    parser.add_argument("--listed", action="store_true")
    parser.add_argument("--quick", action="store_true", help="without the longest tests: fewer are killed, sooner")
    parser.add_argument("--only", default="", help="files whose path contains this")
    options = parser.parse_args()
    if options.listed:
        chosen = list_known_mutants()
    else:
        files = [f for folder in FOLDERS for f in sorted((ROOT / folder).glob("*.py")) if options.only in str(f)]
        all_mutants = [mutant for file in files for mutant in mutants(file)]
        chosen = random.Random(options.seed).sample(all_mutants, min(options.sample, len(all_mutants)))[options.after :]
        print(f"{len(chosen)} of {len(all_mutants)} mutants", flush=True)
    torch.set_num_threads(1)
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("mooring", "tests"):
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, place / name)
        for file in sorted({mutant.file for mutant in chosen})[:1]:  # one file is enough
            if not passes(select_tests(file, True)[0], place):
                raise SystemExit(
                    f"{' '.join(select_tests(file, True)[0])} fail without any mistake; no mutant can be tested."
                )
        for mutant in chosen:
            lives = survives(mutant, place, options.quick)
            alive += [mutant] if lives else []
            print(
                f"{'SURVIVED' if lives else 'killed  '} {mutant.file}:{mutant.line}  {mutant.description}", flush=True
            )
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
