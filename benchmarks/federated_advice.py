"""Recommendations from masked sums against those of all rows in one place, on rows that neither has seen.

    python -m benchmarks.federated_advice --tables FOLDER --out FOLDER [--part design|closed] [--only NAME,NAME]
                                          [--ways sums,sums-linear] [--again] [--show]

Tables come from `benchmarks.tables_fetch`, `heart` and `parkinsons` from the package; 25% of every client's rows are
withheld. The ways are `memory` and `sums` with the default shape, and both with shape "linear". A federation by sums
agrees on its schema, fits, compares and recommends with the programs that clients run; only masks and messages are
left out, which change no number. Every way's test losses are stored, and computed again with --again. --show runs
nothing. The table has, per way and model, the mean test loss relative to that of the same shape in memory, and for
sums the steps (messages to a client) and the numbers of an answer, in all.

    python -m benchmarks.federated_advice --calls 24 [--seed 0]

prints the table of `benchmarks.advice_planted --part calls` for the same federations, in memory and by sums.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import mooring
from benchmarks.advice_planted import GROUPS, CallTotals, state_federation
from benchmarks.advice_tables import KINDS
from benchmarks.planted import planted
from mooring.advice.advise import run_advice
from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS
from mooring.advice.federated.client import schema_options
from mooring.advice.federated.program import advise_program, advise_together, apply_columns, home_rows, shape_of
from mooring.advice.federated.score_models import design, family_of
from mooring.advice.inference.recommendation import DEFAULT_LEVEL, DEFAULT_MARGIN
from mooring.core.errors import RequestError
from mooring.core.summing import run_together
from mooring.data.folds import row_losses
from mooring.data.load_options import LoadOptions
from mooring.data.loading import load, read_client_table
from mooring.data.schema_sums import agree_by_sums
from mooring.engines.prepare import load_options, make_task, prepare
from mooring.engines.request import request

DESIGN = [
    "heart",
    "parkinsons",
    "gapminder",
    "prison",
    "car_mileage",
    "math_districts",
    "train_choice",
    "rice_insurance",
    "hospital_stay",
    "catsup",
]
CLOSED = [
    "driving",
    "macro",
    "vietnam_spending",
    "unemployment_benefits",
    "hiv_results",
    "medicare_stay",
    "patents_rd",
    "cracker",
    "galton",
    "solder",
]
PARTS = {"design": DESIGN, "closed": CLOSED}
EMBEDDED = {"heart": ("hospital", "disease", "binary"), "parkinsons": ("subject", "total_UPDRS", "regression")}
WAYS = ("memory", "memory-linear", "sums", "sums-linear")
TEST_SHARE, MIN_ROWS = 0.25, 3


def read_split_table(folder: Path, name: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """The table with a column that names each row's part, and its columns' roles."""
    if name in EMBEDDED:
        frame = pd.read_csv(Path(mooring.__file__).parent / f"data/embedded/{name}.csv")
        client, target, kind = EMBEDDED[name]
    else:
        entries = json.loads((folder / "tables.json").read_text())["tables"]
        entry = next(entry for entry in entries if entry["name"] == name)
        client, target, kind = entry["client"], entry["target"], entry["kind"]
        frame = pd.read_parquet(folder / f"{name}.parquet")[[client, target, *entry["features"]]]
    rng = np.random.default_rng(sum(name.encode()))
    order = pd.Series(rng.random(len(frame)), index=frame.index).groupby(frame[client]).rank(method="first")
    size = frame[client].groupby(frame[client]).transform("size")
    is_test = order <= np.floor(TEST_SHARE * size + 0.5)
    enough = size - is_test.groupby(frame[client]).transform("sum") >= MIN_ROWS
    frame = frame.assign(split=np.where(is_test, "test", "train"))[enough].reset_index(drop=True)
    return frame, {"client": client, "target": target, "target_type": KINDS[kind]}


def options_of(roles: dict[str, str], way: str) -> dict[str, Any]:
    shape = {"shape": "linear"} if way.endswith("linear") else {}
    return roles | shape | {"split": "split", "min_rows": 1, "theory": False, "threads": 1}


def advise_in_memory(frame: pd.DataFrame, roles: dict[str, str], way: str) -> dict[str, Any]:
    began = time.process_time()
    advice = run_advice(prepare(request(frame, purpose="advise", **options_of(roles, way)), frame))
    clients, task = advice.job.clients, advice.job.task
    unit = clients.target_scale**task.unit_power
    models = dict(zip(MODEL_KINDS, advice.evidence.models.each())) | {"recommended": advice.models.recommended}
    losses = {name: float(row_losses(task, w, clients.test, unit).mean()) for name, w in models.items()}
    counts = advice.clients["recommended"].value_counts().to_dict()
    return {"losses": losses, "counts": counts, "seconds": time.process_time() - began}


def client_program(frame: pd.DataFrame, name: str, run: Any, clients: int) -> Generator:
    """What a client computes, and its sums of test losses."""
    options = load_options(run)
    options.pop("min_category_rows", None)
    member, _, _ = read_client_table({name: frame}, LoadOptions.make(options | {"client": None}))
    agreement = yield from agree_by_sums(member, member.features, schema_options(run), b"benchmark", clients)
    rows = load({name: frame}, **options | {"schema": agreement.schema, "client": None})
    task, advice = make_task(run, rows), run.advice
    result, own = yield from advise_program(
        shape_of(task, rows.schema, advice.shape), home_rows(task, rows), advice.margin, advice.level
    )
    unit = rows.target_scale**task.unit_power
    task, rows = apply_columns(task, rows, result)
    test, family = rows.test.compact(), family_of(task)
    jacobian = design(test.x.double().numpy(), family.scores, bool(getattr(task, "intercept", False)))
    models = {kind: getattr(own.models, f"{kind}_" if kind == "global" else kind).v for kind in MODEL_KINDS}
    models["recommended"] = models[str(own.recommendations.recommended[0])]
    losses = {k: unit * float(family.risk(jacobian @ v, test.y.double().numpy()).sum()) for k, v in models.items()}
    return result, losses, len(test.y)


def advise_by_sums(frame: pd.DataFrame, roles: dict[str, str], way: str) -> dict[str, Any]:
    run = request(frame, purpose="advise", **options_of(roles, way))
    parts = {str(k): part.drop(columns=roles["client"]) for k, part in frame.groupby(roles["client"])}
    began, record = time.process_time(), []
    ended = run_together([client_program(part, k, run, len(parts)) for k, part in parts.items()], record)
    result, rows = ended[0][0], sum(part[2] for part in ended)
    federation = result.federation
    return {
        "losses": {kind: sum(part[1][kind] for part in ended) / rows for kind in (*MODEL_KINDS, "recommended")},
        "counts": result.recommended,
        "seconds": time.process_time() - began,
        "steps": len(record),
        "numbers": sum(size for _, size in record),
        "budget": dict(federation.budget._asdict()),
        "weights": [] if federation.weights is None else [[*map(str, c), w] for c, w in federation.weights.items()],
        "candidate_losses": []
        if federation.losses is None
        else [[*map(str, c), w] for c, w in federation.losses.items()],
    }


def state_by_sums(kind: str, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """What `benchmarks.advice_planted.state_federation` returns, by sums."""
    federation = planted(kind, seed)
    clients, task = federation.clients, federation.task
    homes = [home_rows(task, clients, i) for i in range(len(clients.names))]
    result, own = advise_together(shape_of(task), homes, DEFAULT_MARGIN, DEFAULT_LEVEL)
    models = [np.stack([getattr(part.models, name).v for part in own]) for name in ("local", "global_", "personal")]
    risk = {name: federation.risk(torch.from_numpy(v)).numpy() for name, v in zip(MODEL_KINDS, models)}
    recommended = np.array([str(part.recommendations.recommended[0]) for part in own])
    recommended_risk = np.array([risk[name][i] for i, name in enumerate(recommended)])
    share = (clients.train.size.double() / clients.train.size.sum()).numpy()
    out = {}
    for other in ALTERNATIVES:
        line = None if result.line is None else result.line.personal_line[other]  # None: beyond the budget
        low, high = (0.0, 0.0) if line is None else (line.low, line.high)
        out[other] = {
            "gain": risk[other] - recommended_risk,
            "same": np.array([part.recommendations.is_same[other][0] for part in own]),
            "probability": np.array([float(part.recommendations.over[other].probability[0]) for part in own]),
            "full": np.array([low, high]),
            "low": np.array(low),
            "high": np.array(high),
            "mean": np.array(share @ (risk[other] - risk["personal"])),
        }
    return out


def judge_calls(count: int, seed: int) -> None:
    """Print the measures of `benchmarks.advice_planted` in memory and by sums, on the same federations."""
    print(
        f"{'':16} {'':8} against  feds called  false  (of all)   high  false  mod.+  false    Brier      ECE  covered"
    )
    for group, kinds in GROUPS.items():
        for way, state in (("memory", state_federation), ("sums", state_by_sums)):
            totals = {other: CallTotals() for other in ALTERNATIVES}
            for number in range(count // len(GROUPS)):
                for other, record in state(kinds[number % len(kinds)], seed + number).items():
                    totals[other].add(record)
            for other, total in totals.items():
                print(f"{group:16} {way:8} {other:8} {total.describe()}", flush=True)


def show(out: Path, names: list[str], part: str) -> None:
    rows = []
    for name in names:
        found = {way: json.loads(p.read_text()) for way in WAYS if (p := out / name / f"{way}.json").exists()}
        row: dict[str, Any] = {"table": name}
        for shape in ("", "-linear"):
            memory, sums = found.get(f"memory{shape}", {}), found.get(f"sums{shape}", {})
            if "losses" in memory and "losses" in sums:
                row[f"personal{shape}"] = sums["losses"]["personal"] / memory["losses"]["personal"]
                row[f"recommended{shape}"] = sums["losses"]["recommended"] / memory["losses"]["recommended"]
            for label, source in ((f"memory{shape}", memory), (f"sums{shape}", sums)):
                if "losses" in source:
                    row[label] = f"{source['losses']['recommended']:.5g}"
                else:
                    row[label] = source.get("failed", "")[:40]
        row |= {key: found.get("sums", {}).get(key) for key in ("steps", "numbers", "seconds")}
        rows.append(row)
    table = pd.DataFrame(rows).set_index("table")
    pd.set_option("display.width", 250)
    print(table.round(4).to_string())
    for column in table:
        if str(column).startswith(("personal", "recommended")):
            values = table[column].dropna().astype(float)
            worst = f"worst {values.max():.3f} ({values.idxmax()})" if len(values) else ""
            print(f"{part} {column}: geometric mean {np.exp(np.log(values).mean()):.4f} of {len(values)}, {worst}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--calls", type=int, help="how many planted federations are stated, instead of tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, default="design")
    parser.add_argument("--only", default="")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.calls:
        judge_calls(options.calls, options.seed)
        return
    names = [name for name in PARTS[options.part] if not options.only or name in options.only.split(",")]
    for name in [] if options.show else names:
        frame, roles = read_split_table(options.tables, name)
        for way in options.ways.split(","):
            path = options.out / name / f"{way}.json"
            if path.exists() and not options.again:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                found = (advise_by_sums if way.startswith("sums") else advise_in_memory)(frame, roles, way)
            except RequestError as error:
                found = {"failed": str(error)}
            path.write_text(json.dumps(found, indent=1))
    show(options.out, names, options.part)


if __name__ == "__main__":
    main()
