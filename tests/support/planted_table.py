"""A table of clients with planted linear models."""

import numpy as np
import pandas as pd


def planted(spread, clients=30, samples=40, seed=0, dim=3, noise=1.0):
    """A table with planted models."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=dim) + spread * rng.normal(size=(clients, dim))
    rows = []
    for i in range(clients):
        x = rng.normal(size=(samples, dim))
        frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(dim)])
        rows.append(frame.assign(who=f"c{i}", y=x @ truth[i] + noise * rng.normal(size=samples)))
    return pd.concat(rows, ignore_index=True)
