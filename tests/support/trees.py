"""Random boosted trees."""

import numpy as np

from mooring.shapes.trees import Trees


def draw_trees(count=9, depth=3, features=4, outputs=2, seed=0):
    """Random trees whose first tree has fewer splits."""
    rng = np.random.default_rng(seed)
    threshold = rng.standard_normal((count, 2**depth - 1)).astype(np.float32)
    threshold[:1, 3:] = np.inf
    return Trees(
        features,
        rng.standard_normal(outputs),
        rng.integers(0, features, (count, 2**depth - 1)),
        threshold,
        rng.standard_normal((count, 2**depth)),
        rng.integers(0, outputs, count),
    )
