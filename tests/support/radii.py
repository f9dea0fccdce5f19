"""Radii of true models [m, d] with weights p around their average, to compare estimates with."""

import numpy as np
from scipy.spatial.distance import pdist


def distances(truths, p):
    """|w_i - sum_j p_j w_j| of each client."""
    return np.linalg.norm(np.asarray(truths) - np.asarray(p) @ np.asarray(truths), axis=1)


def radius_rms(truths, p):
    return float(np.sqrt(np.asarray(p) @ distances(truths, p) ** 2))


def radius_max(truths, p):
    return float(distances(truths, p).max())


def pairwise_spread(truths):
    return float(pdist(truths).max())
