"""How much clients differ: measures from known truths, exact objectives or given gradients.

Truths w*_i [m, d], weights p, w*_avg = sum_i p_i w*_i (`alternative`, `effect`):

    R_rms^2 = sum_i p_i |w*_i - w*_avg|^2     R_max = max_i |w*_i - w*_avg|     Gamma = max_ij |w*_i - w*_j|  (`kernel`)

    R_rms <= R_max <= (1 - p_min) Gamma        Gamma <= 2 R_max

Objectives f_i with F = mean_i f_i (apfl, Definitions 2, 3):

    Delta_i = |argmin f_i - argmin F|^2        zeta_i = sup_w |grad F(w) - grad f_i(w)|^2,   zeta = sum_i zeta_i

zeta_i over R^d is infinite for quadratics with different Hessians: here the supremum is over a ball. Delta_i is
measured from argmin F, R from the average of the truths; one does not stand in for the other.

(B, H)-dissimilarity: (1/m) sum_i |grad_i(w)|^2 <= B^2 |mean_i grad_i(w)|^2 + H^2 (mspp, Definition 1). Equal clients
have (1, 0).

lambda_H(S) = sup_{h, h'} mean_S |h(x) - h'(x)| (apfl, Definition 1); for linear h with |w| <= r it is
2 r max_{|u| = 1} mean_S |x'u|, between an ascent's value and 2 r sqrt(largest eigenvalue of X'X/|S|).

Label skew |Dbar - D_i|_1 = sum_y |pbar(y) - p_i(y)| in [0, 2], exact when clients share their class-conditionals
(`apfl`).

Source   alternative, Assumptions B, C; mspp, Definition 1; apfl, Definitions 1-3, Theorem 1; effect, Assumption 1;
         kernel, Theorem 12.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import pdist


def distances(truths: ArrayLike, p: ArrayLike) -> NDArray:
    """|w*_i - w*_avg| per client."""
    truths = np.asarray(truths, dtype=float)
    return np.linalg.norm(truths - np.asarray(p, dtype=float) @ truths, axis=1)


def radius_rms(truths: ArrayLike, p: ArrayLike) -> float:
    """R_rms: the radius of statements on the average excess risk."""
    return float(np.sqrt(np.asarray(p, dtype=float) @ distances(truths, p) ** 2))


def radius_max(truths: ArrayLike, p: ArrayLike) -> float:
    """R_max: the radius of statements on single clients, and of `effect`."""
    return float(distances(truths, p).max())


def pairwise_spread(truths: ArrayLike) -> float:
    """Gamma: the largest distance between two truths."""
    truths = np.asarray(truths, dtype=float)
    return float(pdist(truths).max()) if len(truths) > 1 else 0.0


def minimizer_gaps(local: ArrayLike, global_: ArrayLike) -> NDArray:
    """Delta_i from the minimizers of the f_i [m, d] and of their mean F [d]."""
    return np.sum((np.asarray(local, dtype=float) - np.asarray(global_, dtype=float)) ** 2, axis=1)


def gradient_diversity(
    hessians: ArrayLike, centers: ArrayLike, radius: float, ball_center: ArrayLike | None = None
) -> NDArray:
    """zeta_i over a ball for f_i(w) = 1/2 (w - c_i)' H_i (w - c_i); hessians [m, d, d], centers [m, d].

    With u = w - ball_center the squared difference is u'Au + 2g'u + const, A >= 0. Its maximum over |u| <= r equals its
    dual's minimum, min over nu >= max eig A of nu r^2 + g'(nu - A)^-1 g, a convex function of one variable.
    """
    hessians, centers = np.asarray(hessians, dtype=float), np.asarray(centers, dtype=float)
    start = np.zeros(centers.shape[1]) if ball_center is None else np.asarray(ball_center, dtype=float)
    grads = np.einsum("ijk,ik->ij", hessians, start - centers)
    slopes, offsets = hessians.mean(0) - hessians, grads.mean(0) - grads
    return np.array([_largest_affine_norm2(a, b, radius) for a, b in zip(slopes, offsets)])


def _largest_affine_norm2(slope: NDArray, offset: NDArray, radius: float) -> float:
    """max over |u| <= radius of |slope u + offset|^2."""
    eig, vec = np.linalg.eigh(slope.T @ slope)
    g2 = (vec.T @ (slope.T @ offset)) ** 2
    constant, top = offset @ offset, max(eig[-1], 0.0)
    reach = np.sqrt(g2.sum()) / radius if radius > 0 else 0.0  # the minimizer of the dual lies in [top, top + reach]
    if reach == 0:
        return float(constant + top * radius**2)

    def dual(excess):
        return (top + excess) * radius**2 + np.sum(g2 / (top - eig + excess))

    best = minimize_scalar(dual, bounds=(0, reach), method="bounded", options={"xatol": 1e-12 * reach})
    return float(constant + best.fun)


def smallest_h(grads: ArrayLike, b: float) -> float:
    """The smallest H for a given B over probe points; grads [points, m, d] of the clients at each point."""
    mean_square, square_mean = _gradient_sizes(grads)
    return float(np.sqrt(max(0.0, np.max(mean_square - b**2 * square_mean))))


def smallest_b(grads: ArrayLike) -> float:
    """The smallest B for H = 0 over probe points; inf where the mean gradient vanishes but the clients' do not."""
    mean_square, square_mean = _gradient_sizes(grads)
    ratio = np.where(mean_square > 0, np.inf, 0.0)
    np.divide(mean_square, square_mean, out=ratio, where=square_mean > 0)
    return float(np.sqrt(ratio.max()))


def _gradient_sizes(grads: ArrayLike) -> tuple[NDArray, NDArray]:
    grads = np.asarray(grads, dtype=float)
    return np.mean(np.sum(grads**2, axis=2), axis=1), np.sum(grads.mean(axis=1) ** 2, axis=1)


def hypothesis_disagreement_upper(x: ArrayLike, radius: float) -> float:
    """Upper bound on lambda_H(S) for linear models with |w| <= radius on the records x [n, d]."""
    x = np.asarray(x, dtype=float)
    return float(2 * radius * np.linalg.norm(x, ord=2) / np.sqrt(len(x)))


def disagreement_lower(x: ArrayLike, radius: float, *, starts: int = 32, passes: int = 50, seed: int = 0) -> float:
    """Lower bound on lambda_H(S): u <- normalise(sum_j sign(x_j'u) x_j) climbs from many starts."""
    x = np.asarray(x, dtype=float)
    top = np.linalg.svd(x, full_matrices=False)[2][:1]
    u = np.vstack([top, np.random.default_rng(seed).normal(size=(starts - 1, x.shape[1]))])
    for _ in range(passes):
        u = np.where(u @ x.T >= 0, 1.0, -1.0) @ x
        norm = np.linalg.norm(u, axis=1, keepdims=True)
        u = np.divide(u, norm, out=np.zeros_like(u), where=norm > 0)
    return float(2 * radius * np.abs(u @ x.T).mean(axis=1).max())


def label_skew(counts: ArrayLike) -> NDArray:
    """|Dbar - D_i|_1 per client from label counts [m, classes]; Dbar weighs the clients equally, as in `apfl`."""
    counts = np.asarray(counts, dtype=float)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.abs(shares.mean(axis=0) - shares).sum(axis=1)
