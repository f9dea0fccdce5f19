"""A table of homes in towns, whose columns have scales that differ by orders of magnitude."""

import numpy as np
import pandas as pd


def homes(seed=0, towns=4, n=80):
    """Columns on scales that have nothing in common, and a category of two levels."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"town": np.repeat([f"town {i}" for i in range(towns)], n)})
    frame["area"] = rng.normal(9000, 2500, len(frame))
    frame["share"] = rng.normal(0.02, 0.004, len(frame))
    frame["garden"] = np.where(rng.random(len(frame)) < 0.4, "yes", "no")
    own = np.repeat(rng.normal(size=(towns, 4)), n, axis=0)
    score = own[:, 0] + (1 + own[:, 1]) * (frame["area"] - 9000) / 2500 + own[:, 2] * (frame["share"] - 0.02) / 0.004
    score += own[:, 3] * (frame["garden"] == "yes") + rng.normal(size=len(frame))
    frame["price"] = 250_000 + 40_000 * score
    frame["sold"] = np.where(score + rng.logistic(size=len(frame)) > 0, "sold", "kept")
    frame["band"] = pd.cut(score + rng.logistic(size=len(frame)), [-99, -1, 1, 99], labels=["a", "b", "c"]).astype(str)
    frame["split"] = np.tile(np.repeat(["train", "validation", "test"], [n // 2, n // 4, n // 4]), towns)
    return frame


def design(frame):
    return np.column_stack([np.ones(len(frame)), frame["area"], frame["share"], frame["garden"] == "yes"]).astype(float)
