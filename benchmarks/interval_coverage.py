"""How often prediction intervals contain the observed value, at clients of the run and at new clients.

    python -m benchmarks.interval_coverage [--splits 5] [--level 0.9] [--data-dir DIR] [--tables exam,hsb82,parkinsons]

In each split a fifth of the clients is new to the run, so that each client is new once in five splits, and a quarter of
the others' rows is withheld. Without --data-dir only planted
tables are measured: 40 clients of 8 to 59 rows with intercepts, slopes and noises of their own.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

import mooring

SLOPES = (1.0, 0.5, -1.0)
NEW_PARTS = 5  # of the clients, each of which is new to the run in turn


def plant_table(seed: int, clients: int = 40) -> pd.DataFrame:
    """A table of clients that vary in intercept, slopes and noise."""
    rng = np.random.default_rng(seed)
    code = np.repeat(np.arange(clients), rng.integers(8, 60, clients))
    x = rng.normal(size=(len(code), len(SLOPES)))
    slopes = rng.normal(SLOPES, 0.5, (clients, len(SLOPES)))
    intercepts, noise = rng.normal(0, 1, clients), rng.uniform(0.7, 1.5, clients)
    y = intercepts[code] + (x * slopes[code]).sum(1) + noise[code] * rng.normal(size=len(code))
    return pd.DataFrame(x, columns=["u", "v", "w"]).assign(site=[f"site {i}" for i in code], y=y)


def read_table(path: Path) -> pd.DataFrame:
    with np.load(path) as arrays:
        x, y, group = (arrays[name] for name in ("X", "y", "group"))
    columns = [f"column {j}" for j in range(x.shape[1])]
    return pd.DataFrame(x.astype(float), columns=columns).assign(site=[f"site {i}" for i in group], y=y.astype(float))


def measure_coverage(frame: pd.DataFrame, seed: int, level: float) -> tuple[float, float]:
    """Return the shares of withheld rows inside their interval, at known and at new clients."""
    rng = np.random.default_rng(seed)
    names = np.random.default_rng(seed // NEW_PARTS).permutation(frame["site"].unique())
    is_new = frame["site"].isin(names[seed % NEW_PARTS :: NEW_PARTS])
    is_withheld = ~is_new & (rng.random(len(frame)) < 0.25)
    train = frame[~is_new & ~is_withheld]
    withheld_known = frame[is_withheld & frame["site"].isin(train["site"].unique())]
    advice = mooring.advise(train, client="site", target="y", theory=False)
    shares = []
    for part in (withheld_known, frame[is_new]):
        predicted = advice.predict(part, interval=level)
        shares.append(float(predicted["y (actual)"].between(predicted["y_low"], predicted["y_high"]).mean()))
    return shares[0], shares[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tables", default="exam,hsb82,parkinsons")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # notes on the data are not the subject
    sources = {"planted": plant_table}
    if options.data_dir is not None:
        for name in options.tables.split(","):
            frame = read_table(options.data_dir / f"tab_{name}.npz")
            sources[name] = lambda seed, frame=frame: frame
    print(f"{'table':12} {'splits':>6} {'known':>7} {'new':>7}    intervals of {options.level:.0%}")
    for name, make in sources.items():
        shares = [measure_coverage(make(seed), seed, options.level) for seed in range(options.splits)]
        known_share, new_share = np.mean(shares, axis=0)
        print(f"{name:12} {options.splits:6d} {known_share:7.1%} {new_share:7.1%}", flush=True)


if __name__ == "__main__":
    main()
