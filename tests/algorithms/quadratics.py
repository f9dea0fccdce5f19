"""The quadratic oracle: clients whose FedProx minimiser is known in closed form.

L_i(w) = 1/2 (w - c_i)' H_i (w - c_i) has prox_i(v) = (H_i + lam)^-1 (H_i c_i + lam v), and the global model w~ of the
FedProx objective solves sum_i p_i lam (H_i + lam)^-1 H_i (w - c_i) = 0.
"""

import numpy as np

from mooring.data.clients import from_arrays
from mooring.tasks.linear import Linear

M, D, MU, SMOOTH, LAM = 6, 4, 0.5, 2.0, 0.8


class Quadratics:
    """Random quadratics with curvatures in [MU, SMOOTH], both attained, as rows of a linear regression."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        turn = [np.linalg.qr(rng.normal(size=(D, D)))[0] for _ in range(M)]
        eigenvalues = np.sort(rng.uniform(MU, SMOOTH, size=(M, D)), axis=1)
        eigenvalues[:, 0], eigenvalues[:, -1] = MU, SMOOTH
        self.h = [q @ np.diag(e) @ q.T for q, e in zip(turn, eigenvalues)]
        self.c = rng.normal(size=(M, D))
        roots = [np.sqrt(D) * np.diag(np.sqrt(e)) @ q.T for q, e in zip(turn, eigenvalues)]
        self.clients = from_arrays(roots, [x @ c for x, c in zip(roots, self.c)])
        self.task = Linear(D, intercept=False)
        self.p = np.full(M, 1 / M)

    def minimiser(self, lam):
        """w~ for lam a number or [M, D] (diagonal), and the prox at it."""
        lam = [np.diag(row) for row in np.broadcast_to(lam, (M, D))]
        bend = [s @ np.linalg.solve(h + s, h) for h, s in zip(self.h, lam)]
        w = np.linalg.solve(sum(bend), sum(b @ c for b, c in zip(bend, self.c)))
        return w, np.stack([np.linalg.solve(h + s, h @ c + s @ w) for h, s, c in zip(self.h, lam, self.c)])
