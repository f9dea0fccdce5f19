"""Tests of the promises of docs/reliability.md: `make torture` (half an hour), or `python -m benchmarks.torture T3 T5`.

One row per promise: attempts, survived, worst case. Kills and disk errors are injected by strace at every call that
writes, syncs, renames, makes or removes something (`strace -p CHILD -e inject=...`); without strace these two are
skipped, and the table states it. `--quick` makes a few attempts of each kind.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

import mooring
from mooring.algorithms.base import algorithm_names, build
from mooring.core import attacks
from mooring.core.errors import RequestError, WorkError
from mooring.data.clients import from_arrays
from mooring.data.loading import load
from mooring.engines import compare as comparing
from mooring.engines import fit as fitting
from mooring.engines.callbacks import plan_callbacks
from mooring.engines.loop import run
from mooring.engines.privacy import compute_epsilon, draw_normals
from mooring.engines.reply_checks import check_sizes, check_weights, clip_messages
from mooring.engines.simulator import resolve
from mooring.engines.training_state import TrainingPlan, TrainingState
from mooring.report.html_report import write_report
from mooring.runs.atomic_files import CHECKSUM_MARK, json_bytes, read_json, read_parquet
from mooring.runs.checkpoint import CHECKPOINT_FOLDER, read_latest_checkpoint
from mooring.runs.directory import SECONDS_FILE, open_run
from mooring.runs.runfile import read_run
from mooring.runs.tensor_files import read_tensors
from mooring.tasks.linear import Linear
from mooring.testing import FINITE, REFUSED, check_federated

CALLS = ("write", "pwrite64", "fsync", "rename", "mkdir", "unlink", "ftruncate")
ERRORS = ("ENOSPC", "EIO", "EACCES")
COLUMNS: dict[str, Any] = {"client": "who", "target": "y", "threads": 1}
TrialResult = tuple[int, int, str]  # attempts, survived, worst case


class Trial(NamedTuple):
    key: str
    promise: str
    work: Callable[[Path, bool], TrialResult]


def table(path: Path, clients: int = 6, rows: int = 20) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(clients * rows, 3)), columns=["a", "b", "c"])
    frame["who"] = np.repeat([f"client {k}" for k in range(clients)], rows)
    slope = np.repeat(1 + rng.normal(size=clients) / 3, rows)
    frame["y"] = frame["a"] * slope - frame["b"] + 0.3 * rng.normal(size=len(frame))
    frame.to_csv(path, index=False)
    return path


def digests(folder: Path) -> dict[str, str]:
    """Return digests of all files that equal runs share; seconds in a JSON file do not count."""
    files = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name not in (SECONDS_FILE, ".mooring.lock"))
    return {str(f.relative_to(folder)): hashlib.sha256(read_without_seconds(f)).hexdigest() for f in files}


def read_without_seconds(file: Path) -> bytes:
    if file.suffix != ".json" or "seconds" not in (content := read_json(file)):
        return file.read_bytes()
    return json_bytes({name: value for name, value in content.items() if name != "seconds"})


def fork_stopped(work: Callable[[], Any]) -> int:
    """Start a child that waits for SIGCONT, then works; it ends with 0, 3 after a user error, or 4 after any other
    error."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        code = 0
        try:
            warnings.simplefilter("ignore")
            work()
        except (RequestError, WorkError):
            code = 3
        except BaseException:
            code = 4
        os._exit(code)
    os.waitpid(child, os.WUNTRACED)
    return child


def run_traced(work: Callable[[], Any], inject: str | None, log: Path) -> int:
    """Return the child's exit status under strace: its code, or minus the signal."""
    child = fork_stopped(work)
    trace_options = ["-e", f"trace={','.join(CALLS)}", *(["-e", f"inject={inject}"] if inject else [])]
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(log), *trace_options, "-p", str(child)], stderr=subprocess.DEVNULL
    )
    while "TracerPid:\t0" in Path(f"/proc/{child}/status").read_text():
        time.sleep(0.005)
    os.kill(child, signal.SIGCONT)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tracer.wait()
    return status


def list_calls(work: Callable[[], Any], folder: Path) -> list[tuple[str, int]]:
    """Return every traced call of one undisturbed run: (its name, its number)."""
    log = folder / "calls"
    assert run_traced(work, None, log) == 0
    count = Counter(call for line in log.read_text().splitlines() for call in CALLS if f" {call}(" in f" {line}")
    return [(call, k) for call in CALLS for k in range(1, count[call] + 1)]


class Job(NamedTuple):
    name: str
    out: Path  # its output, removed before a restart
    begin: Callable[[], Any]
    resume: Callable[[], Any]  # where `out` exists


def jobs(folder: Path) -> list[Job]:
    """Return training commands that can be resumed."""
    rows, out = table(folder / "rows.csv"), folder / "run"
    options = COLUMNS | {"rounds": 5, "checkpoint_every": 1, "out": out}
    return [
        Job("fit", out, lambda: mooring.fit(rows, algorithm="apfl", **options), lambda: fitting.resume_fit(out)),
        Job(
            "compare",
            out,
            lambda: mooring.compare(rows, ["local", "scaffold"], **options),
            lambda: comparing.resume_comparison(out),
        ),
    ]


def other_jobs(folder: Path) -> list[Job]:
    """Return commands that have nothing to resume: their output is complete, or they are run again."""
    rows, new_client, before = table(folder / "rows.csv"), folder / "new_client.csv", folder / "before"
    pd.read_csv(rows).query("who == 'client 0'").drop(columns="who").to_csv(new_client, index=False)
    joined, page = folder / "joined", folder / "page"
    options = COLUMNS | {"rounds": 3, "checkpoint_every": 1}
    mooring.fit(rows, algorithm="apfl", out=before, **options)

    def show() -> None:
        page.mkdir(exist_ok=True)
        write_report([before], page / "report.html")

    return [
        Job(
            "personalize", joined, lambda: mooring.personalize(before, new_client, out=joined), lambda: open_run(joined)
        ),
        Job("report", page, show, show),
    ]


def find_damage(job: Job, right: dict[str, str]) -> str:
    """Resume an interrupted run and return what differs from an undisturbed one, or ""."""
    try:
        job.resume() if job.out.exists() else job.begin()
        resumed = digests(job.out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if resumed == right else f"other bytes in {[k for k in right if resumed.get(k) != right[k]][:3]}"


def select(items: list[Any], quick: bool, count: int = 6) -> list[Any]:
    return random.Random(0).sample(items, min(count, len(items))) if quick else items


def kills(folder: Path, quick: bool) -> TrialResult:
    return kill_jobs([*jobs(folder), *other_jobs(folder)], folder, quick)


def kill_jobs(tried_jobs: list[Job], folder: Path, quick: bool) -> TrialResult:
    """Kill each job at calls and at moments, resume it, and compare with an undisturbed run."""
    attempts, wrong = 0, []
    for job in tried_jobs:
        job.begin()
        right = digests(job.out)
        shutil.rmtree(job.out)
        calls = list_calls(job.begin, folder)
        shutil.rmtree(job.out)
        is_fit = job.name == "fit"  # every call is tried; of other jobs, some calls
        for call, k in select(calls, quick or not is_fit, 6 if quick else 40):
            status = run_traced(job.begin, f"{call}:signal=KILL:when={k}", folder / "calls")
            problem = find_damage(job, right) if status == -9 else f"was not killed ({status})"
            wrong += [f"{job.name}, {call} {k}: {problem}"] * bool(problem)
            attempts += 1
            shutil.rmtree(job.out, ignore_errors=True)
        begin = time.perf_counter()
        job.begin()
        took = time.perf_counter() - begin
        shutil.rmtree(job.out)
        for moment in random.Random(1).choices(range(1000), k=4 if quick else 200 if is_fit else 20):
            child = fork_stopped(job.begin)
            os.kill(child, signal.SIGCONT)
            time.sleep(took * moment / 900)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            problem = find_damage(job, right)
            wrong += [f"{job.name}, after {moment / 9:.0f} % of its time: {problem}"] * bool(problem)
            attempts += 1
            shutil.rmtree(job.out, ignore_errors=True)
        print(f"T1: {job.name}: {len(calls)} calls", file=sys.stderr, flush=True)
    return attempts, attempts - len(wrong), wrong[0] if wrong else "all come to the same bytes"


def disk_errors(folder: Path, quick: bool) -> TrialResult:
    job, out = jobs(folder)[0], folder / "run"
    job.begin()
    right = digests(out)
    shutil.rmtree(out)
    calls = [(call, k, error) for call, k in list_calls(job.begin, folder) for error in ERRORS]
    shutil.rmtree(out)
    wrong, status_counts = [], Counter()
    for call, k, error in select(calls, quick):
        status = run_traced(job.begin, f"{call}:error={error}:when={k}", folder / "calls")
        status_counts[status] += 1
        failed_call = f"{call} {k} {error}"
        if status == 0 and out.exists() and digests(out) != right:
            wrong.append(f"{failed_call}: a false success")
        elif status not in (0, 3):
            wrong.append(f"{failed_call}: ended with {status}")
        elif problem := find_damage(job, right):
            wrong.append(f"{failed_call}: {problem}")
        shutil.rmtree(out, ignore_errors=True)
    outcome = f"{status_counts[3]} refused in a sentence, {status_counts[0]} without harm"
    return len(select(calls, quick)), len(select(calls, quick)) - len(wrong), wrong[0] if wrong else outcome


def damage(folder: Path, quick: bool) -> TrialResult:
    job, out = jobs(folder)[0], folder / "run"
    job.begin()
    readers = {".json": read_json, ".parquet": read_parquet, ".safetensors": read_tensors}
    files = [f for f in sorted(out.rglob("*")) if f.suffix in readers or f.name == "run.toml"]
    rng, silent, count = random.Random(0), [], 30 if quick else 1000
    newest = max((out / CHECKPOINT_FOLDER).iterdir())
    for k in range(count):
        file = files[k % len(files)]
        original = file.read_bytes()
        bad = bytearray(original)
        if k % 3:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        else:
            del bad[rng.randrange(len(bad)) :]
        file.write_bytes(bad)
        try:
            _ = open_run(out).run if file.name == "run.toml" else readers[file.suffix](file)
            silent.append(f"{file.name} was read")
        except RequestError:
            if file == newest and (checkpoint := read_latest_checkpoint(out)) is not None and checkpoint.note is None:
                silent.append(f"{file.name} was passed over without a word")
        file.write_bytes(original)
    return count, count - len(silent), silent[0] if silent else f"all noticed, in {len(files)} files"


class Cut(Exception):
    pass


def every_cut(folder: Path, quick: bool) -> TrialResult:
    rows, attempts, wrong, refused = table(folder / "rows.csv"), 0, [], []
    for name in select(list(algorithm_names()), quick, 3):
        options = COLUMNS | {"algorithm": name, "rounds": 4, "checkpoint_every": 1}
        options |= {"task": "kernel"} if name.startswith("kernel") else {}
        try:
            right = mooring.fit(rows, out=folder / "whole", **options)
        except RequestError:
            refused.append(name)
            continue
        for at in range(1, right.summary["last_round"] + 1):

            def stop(label: str, done: int, rounds: int, at: int = at) -> None:
                if done == at:
                    raise Cut

            try:
                mooring.fit(rows, out=folder / "cut", progress=stop, **options)
            except Cut:
                fitting.resume_fit(folder / "cut")
            attempts += 1
            if digests(folder / "cut") != digests(folder / "whole"):
                wrong.append(f"{name} cut in round {at}")
            shutil.rmtree(folder / "cut")
        shutil.rmtree(folder / "whole")
    refused_text = f"; not for this table: {', '.join(refused)}" if refused else ""
    return attempts, attempts - len(wrong), (wrong[0] if wrong else "equal bytes in every file") + refused_text


def poison(folder: Path, quick: bool) -> TrialResult:
    from tests.engines.test_reply_checks import LIES, federation

    wrong, attempts, worst = [], 0, 0.0
    for k in [1, 10, 19] if quick else range(1, 20):
        algorithm, without, progress = federation(20, alone=range(k, 20))
        right = run(algorithm, without, TrainingPlan(rounds=4), progress).state.server.w
        for lie in LIES:
            if lie == "1e30" and k > 9:
                continue  # the majority reports it
            algorithm, exchange, progress = federation(20, tuple(range(k)), lie)
            state = run(algorithm, exchange, TrainingPlan(rounds=4), progress).state
            off = float(((state.server.w - right).abs() / right.abs().clamp(min=1e-2)).max())
            worst, attempts = max(worst, off), attempts + 1
            if not off <= 1e-12 or sorted(state.offenders) != list(range(k)):
                wrong.append(f"{k} of 20 send {lie}: off by {off:.2g}, named {sorted(state.offenders)}")
    for lie in LIES:
        if lie == "1e30":
            continue
        algorithm, exchange, progress = federation(20, tuple(range(20)), lie)
        before, attempts = progress.server.w.clone(), attempts + 1
        try:
            run(algorithm, exchange, TrainingPlan(rounds=4), progress)
            wrong.append(f"20 of 20 send {lie}: nobody says so")
        except WorkError:
            if not progress.server.w.equal(before):
                wrong.append(f"20 of 20 send {lie}: the model moved")
    return attempts, attempts - len(wrong), wrong[0] if wrong else f"off by {worst:.1g} of the model at most"


def weights(folder: Path, quick: bool) -> TrialResult:
    wrong = []
    lies = (-1, float("nan"), 1e30, "text", 0)
    for lie in lies:
        try:
            size = check_sizes(["a", "liar"], [10, lie])
            check_weights(["a", "liar"], size / size.sum())
            if lie != 0 or float(size[1]) != 0:
                wrong.append(f"{lie!r} rows are believed")
        except RequestError as error:
            if "'liar'" not in str(error):
                wrong.append(f"{lie!r} rows: {error}")
    return len(lies), len(lies) - len(wrong), wrong[0] if wrong else "four refused by name, 0 rows weigh 0"


def liars(folder: Path, quick: bool) -> TrialResult:
    rows = table(folder / "rows.csv", clients=20, rows=60)
    digits: dict[str, Any] = {"partition": {"clients": 20}, "threads": 1, "algorithm": "ditto"}
    sources = {"table": (rows, COLUMNS | {"algorithm": "ditto", "rounds": 20})}
    if not quick:
        sources["digits"] = ("digits", digits | {"rounds": 10})
    shares = (0.2,) if quick else (0.1, 0.2, 0.3, 0.4)
    kinds = ("sign-flip", "little") if quick else ("sign-flip", "scale", "little", "label-flip")
    attempts, wrong, lines = 0, [], []
    for title, (source, options) in sources.items():
        honest_run = mooring.fit(source, **options)
        keys = honest_run.job.clients.keys

        def score(result: Any, lying: np.ndarray) -> float:
            """Return 100 R2, or percent of right answers, of the honest clients' personal models."""
            frame = result.clients[~lying]
            return 100 * float(np.average(frame["accuracy" if "accuracy" in frame else "r2"], weights=frame["test"]))

        for kind in kinds:
            for share in shares:
                spec = f"{kind}:{share}"
                lying = np.asarray(attacks.malicious_clients(spec, 0, keys))
                lying = lying if lying.dtype == bool else np.isin(np.arange(len(keys)), lying)
                row = []
                for average in ("mean", "median", "trimmed:0.4" if share > 0.25 else "trimmed", "clipped"):
                    try:
                        points_lost = score(honest_run, lying) - score(
                            mooring.fit(source, attack=spec, average=average, **options), lying
                        )
                    except WorkError:
                        points_lost = math.inf
                    row.append(f"{average} {points_lost:.1f}")
                    if average != "mean" and average != "clipped" and share <= 0.2:
                        attempts += 1
                        wrong += [f"{title}, {spec}, {average}: {points_lost:.1f} points"] * (not points_lost <= 2)
                lines.append(f"{title}, {spec}: points lost by honest clients: {', '.join(row)}")
    print("\n".join(lines), file=sys.stderr)
    return attempts, attempts - len(wrong), wrong[0] if wrong else "at most 2 points lost up to 20 % liars"


def odd_clients(folder: Path, quick: bool) -> TrialResult:
    attempts, wrong, outcome_counts = 0, [], Counter()
    for k, name in enumerate(algorithm_names()):
        try:
            outcomes = check_federated(build(name, {}), slice(k % 20, None, 20) if quick else slice(None))
            outcome_counts.update(outcome.outcome for outcome in outcomes)
            attempts += len(outcomes)
        except AssertionError as error:
            wrong.append(str(error))
            attempts += 1
    return (
        attempts,
        attempts - len(wrong),
        wrong[0] if wrong else f"{outcome_counts[FINITE]} finite, {outcome_counts[REFUSED]} refused by name",
    )


def mutate(data: bytes, rng: random.Random) -> bytes:
    bad = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(bad)) if bad else 0
        kind = rng.randrange(5)
        if kind == 0:
            bad[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del bad[at : at + rng.randint(1, 40)]
        elif kind == 2:
            bad[at:at] = rng.choice(
                [b"\0", b'"', b",", b"\n", b"\r", b"nan", b"1e999", b"-inf", b"\xff\xfe", b"[[", b"=1"]
            )
        elif kind == 3:
            bad[at:at] = bad[: rng.randint(1, 60)]
        else:
            bad = bad[: max(at, 1)]
    return bytes(bad)


def mutated_files(folder: Path, quick: bool) -> TrialResult:
    rows = pd.read_csv(table(folder / "rows.csv", 3, 12))
    rows.to_parquet(folder / "rows.parquet")
    np.savez(folder / "rows.npz", X=rows[["a", "b", "c"]], y=rows["y"], groups=rows["who"].str[-1].astype(int))
    mooring.fit(folder / "rows.csv", algorithm="local", out=folder / "run", **COLUMNS)
    rng, wrong, read, slowest = random.Random(0), [], 0, 0.0
    count = 40 if quick else 1000
    sources = [folder / "rows.csv", folder / "rows.parquet", folder / "rows.npz", folder / "run/run.toml"]
    for k in range(count):
        source = sources[k % len(sources)]
        bad = folder / f"bad{source.suffix}"
        bad.write_bytes(mutate(source.read_bytes(), rng))
        begin = time.process_time()
        try:
            if source.suffix == ".toml":
                read_run(bad)
            elif source.suffix == ".npz":
                load(bad)
            else:
                load(bad, client="who", target="y")
            read += 1
        except RequestError:
            pass
        except Exception as error:
            wrong.append(f"{source.name} {k}: {type(error).__name__}: {str(error)[:80]}")
        slowest = max(slowest, time.process_time() - begin)
    outcome = f"{read} read, {count - read} refused in a sentence, the slowest in {slowest:.1f} s"
    return count, count - len(wrong), wrong[0] if wrong else outcome


def growth(folder: Path, quick: bool) -> TrialResult:
    clients, rounds = (1000, 200) if quick else (10_000, 500)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(6, 5)) for _ in range(clients)]
    data = from_arrays(xs, [x @ np.ones(5) for x in xs])
    algorithm, exchange, server = resolve(build("scaffold", {"eta": 0.05}), Linear(5), data)
    megabytes: list[float] = []

    def measure_memory(state: TrainingState, _: int) -> None:
        megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)

    plan = TrainingPlan(rounds=rounds, participation=100, evaluate_every=rounds // 4)
    callbacks = plan_callbacks(algorithm, plan, clients, report=measure_memory)
    run(algorithm, exchange, plan, TrainingState(server), callbacks)
    begin = rounds // 5
    grown = (max(megabytes[-20:]) - max(megabytes[begin : begin + 20])) / (rounds - begin) * 100
    return 1, int(grown < 1), f"{clients:,} clients, {rounds} rounds: {grown:+.2f} MB in 100 rounds after warm-up"


def unpickled(folder: Path, quick: bool) -> TrialResult:
    jobs(folder)[0].begin()
    path = folder / "run/models.safetensors"
    original, rng, wrong, slowest = path.read_bytes(), random.Random(0), [], 0.0
    count, before = 40 if quick else 1000, len(UNPICKLED)
    for k in range(count):
        bad = mutate(original, rng)
        if k % 2 and bad.count(CHECKSUM_MARK) == 1:  # an attacker updates the checksum of the changed file
            place = bad.index(CHECKSUM_MARK) + len(CHECKSUM_MARK)
            blank = bad[:place] + b"0" * 64 + bad[place + 64 :]
            bad = bad[:place] + hashlib.sha256(blank).hexdigest().encode() + bad[place + 64 :]
        path.write_bytes(bad)
        begin = time.process_time()
        try:
            read_tensors(path)
            if not k % 2:
                wrong.append("a changed file was read")
        except RequestError:
            pass
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {str(error)[:80]}")
        slowest = max(slowest, time.process_time() - begin)
    wrong += ["something was unpickled"] * (len(UNPICKLED) > before)
    return (
        count,
        count - len(wrong),
        wrong[0] if wrong else f"nothing unpickled, the slowest in {1000 * slowest:.0f} ms",
    )


UNPICKLED: list[str] = []  # names of classes that were unpickled


def privacy(folder: Path, quick: bool) -> TrialResult:
    from scipy import optimize, stats

    wrong, worst = [], 0.0
    cases = [(z, n, d) for z in (0.7, 1.0, 3.0) for n in (1, 10, 100) for d in (1e-6, 1e-5, 1e-3)]
    for noise, releases, delta in cases:
        s = noise / math.sqrt(releases)
        bound = lambda e, s=s: stats.norm.cdf(0.5 / s - e * s) - math.exp(e) * stats.norm.cdf(-0.5 / s - e * s)  # noqa: E731
        right = optimize.brentq(lambda e, f=bound, delta=delta: f(e) - delta, 0, 650, xtol=1e-12)
        worst = max(worst, abs(compute_epsilon(noise, releases, delta) - right))
    wrong += [f"epsilon is off by {worst:.1g}"] * (worst > 1e-6)
    spread = float(draw_normals(b"torture", 10**6).std())
    wrong += [f"noise of {spread:.4f} for 1"] * (abs(spread - 1) > 0.01)
    updates = (
        torch.randn(10_000, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 10_000)[:, None]
    )
    longest = float(clip_messages(updates, 0.7).double().norm(dim=1).max())
    wrong += [f"a clipped update is {longest:.9f} long"] * (longest > 0.7)
    outcome = f"epsilon off by {worst:.0e}, noise by {abs(spread - 1):.2%}, longest update {longest / 0.7:.7f} clips"
    return len(cases) + 2, len(cases) + 2 - len(wrong), wrong[0] if wrong else outcome


TRIALS = [
    Trial("T1", "a killed command comes to the same bytes", kills),
    Trial("T2", "a full or broken disk costs nothing that was saved", disk_errors),
    Trial("T3", "a damaged file is never loaded silently", damage),
    Trial("T4", "a resume is exact, every algorithm, every cut round", every_cut),
    Trial("T5", "bad clients cannot poison the rest", poison),
    Trial("T6", "a client cannot lie about its weight", weights),
    Trial("T7", "robust averages hold against a fifth of liars", liars),
    Trial("T8", "odd clients are stood or named, every algorithm", odd_clients),
    Trial("T8 files", "odd files are read or refused in a sentence", mutated_files),
    Trial("T10", "memory does not grow", growth),
    Trial("T12", "nothing is unpickled, changed models are refused", unpickled),
    Trial("T15", "privacy figures are true", privacy),
]
STRACED = ("T1", "T2")


def run_trials(keys: list[str], quick: bool) -> Iterator[tuple[Trial, TrialResult, float]]:
    for trial in TRIALS:
        if keys and trial.key.split()[0] not in keys:
            continue
        if trial.key in STRACED and shutil.which("strace") is None:
            yield trial, (0, 0, "left out: strace is not installed"), 0.0
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield trial, trial.work(Path(folder), quick), time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", help="T1 T3 ...: these only")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.addaudithook(lambda event, args: UNPICKLED.append(str(args)) if event == "pickle.find_class" else None)
    print("| trial | promise | attempts | survived | worst case |\n|---|---|---|---|---|", flush=True)
    failures = 0
    for trial, (attempts, survived, worst), took in run_trials(options.which, options.quick):
        print(f"| {trial.key} | {trial.promise} | {attempts:,} | {survived:,} | {worst} |", flush=True)
        print(f"{trial.key}: {took:.0f} s", file=sys.stderr, flush=True)
        failures += attempts - survived
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
