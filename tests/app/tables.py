"""A small table of shops, as an analyst would drop it."""

import numpy as np
import pandas as pd


def table():
    """Six shops with planted linear models, and one with two rows."""
    rng = np.random.default_rng(0)
    parts = []
    for i, rows in enumerate([30] * 6 + [4]):
        x = rng.normal(size=(rows, 2))
        sold = x @ (1 + 0.4 * rng.normal(size=2)) + rng.normal(size=rows)
        name = f"Shop-{i}" if rows > 4 else "Shop-tiny"
        parts.append(pd.DataFrame(x.round(3), columns=["price", "rain"]).assign(shop=name, sold=sold.round(3)))
    return pd.concat(parts, ignore_index=True)[["shop", "price", "rain", "sold"]]
