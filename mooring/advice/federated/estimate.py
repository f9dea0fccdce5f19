"""What every client of a federation computes about its models, and the sums that it needs of all clients.

    sizes          how many rows there are, and in which classes of size the clients lie
    histogram      knots of curves in numeric columns (`curves.py`); all below is done without and with these columns,
                   in the same sums
    global model   pooled moments (regression), or gradients and few Hessians at models that all clients know
    noise          regression: each client's own noise variance, shrunk to all clients'; counts: their dispersion
    spread         how much coefficients vary between clients: one variance for all from a grid of likelihoods, of the
                   intercept alone likewise, then one per coefficient by few steps, with a center of their own
    candidates     models between global and local for multiples of these variances; each client fits its own, evaluates
                   them without its own rows (`score_models.py`), and weighs them by all clients' losses
    evidence       local, global and personal models by rows that they have not seen (`inference/`)

The between-client variances maximize the product over clients of the likelihood of a client's rows given the others'
global model w_i, which the client computes itself from what all clients know:

    r_i ~ N(0, phi_i + X_i (T m / (m - 1) + phi G_i) X_i'),   r_i = y_i - X_i w_i

with G_i the inverse of the others' curvature (for other losses by Laplace's method). A step for a variance per
coefficient is t_j <- t_j sum_i u_ij^2 / sum_i (P_i - P_i A^-1 P_i)_jj with u_i = P_i (v_i - w),
P_i = (K_i^-1 + T)^-1 and A = sum_i P_i, as in the majorize-minimize algorithm but without its square root, which takes
fewer, bolder steps. The center that these models are pulled to moves with them, by A^-1 sum_i u_i. A is not added up,
since it is no sum of single rows' functions: it is that of clients with an equal share of all rows' curvature, and has
the diagonal of the real one. Where variances are uneven this center is far from the pooled model (`prison`: a test loss
of 0.30 instead of 0.36). Rows that are left out leave it, too.

Numbers that are not linear in rows are counted. What the budget does not allow is left out, from the end of this list:
the pooled losses and one variance for all, that of the intercept, the evidence (the slopes of held-out differences and
the guard), candidates weighed by all clients instead of each by itself (without these the losses of the global models
choose between columns with and without curves), a variance per coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mooring.advice.evaluation.loss_sums import LossSums, zero_sums
from mooring.advice.evaluation.setting_choice import log_likelihood_deficits
from mooring.advice.federated.curves import columns_program, expand
from mooring.advice.federated.score_models import (
    Center,
    Family,
    HomeFit,
    HomeRows,
    center_moves,
    fit_local,
    fit_pulled,
    minimize,
    solve,
)
from mooring.core.errors import RequestError
from mooring.core.summing import Program, Step, Sum, side_by_side
from mooring.estimates.random_effects import variance_log_sums, variance_prior
from mooring.shapes.columns import LINEAR, SPLINE, ShapedColumns

MIN_CLIENTS = 3
ROWS_PER_COEFFICIENT = 3  # of a matrix: so many rows, without the two largest clients, times its order and one
MAX_SHARE = 0.5  # of the rows that one client may have
SIZE_CLASSES = 24  # powers of two
MIN_ROWS_FOR_CURVES = 50  # per linear score
MAX_GRADIENTS, MAX_HESSIANS, GRADIENTS_BEFORE_HESSIAN = 12, 2, 3
STEP_TOLERANCE = 1e-4  # squared standard errors by which a step still moves the global model
BACKTRACK = 0.3
VARIANCES = 10.0 ** np.linspace(-5, 2, 12)  # of the grid, in units of the target's and of the columns' scales
VARIANCE_STEPS, MIN_VARIANCE_STEPS = 20, 2
GROWTH = 4.0  # of a step's size by smaller variances alone; beyond, the step was too long
MAX_SCORE, MAX_COEFFICIENT = 1e9, 1e3
MAX_LOSS_RATIO = 1e4  # of a row's loss to the mean of the global model: more shows nothing
CENTER_TOLERANCE, VARIANCE_TOLERANCE = 0.05, 0.1  # squared standard errors, and logs of variances, of a last step
MAX_VARIANCE_CHANGE, MIN_VARIANCE = 100.0, 1e-9
FACTORS = (16.0, 4.0, 1.0, 0.25, 0.0625)  # on the variances
FIXED_VARIANCES = (1e-3, 1e-2, 0.1, 1.0)  # tried, too: likelihoods of few rows may be far off
START_VARIANCE = 1e-2  # from which steps for one variance per coefficient begin, at least
MIXTURE_SHARES, MIXTURE_RIDGE = (0.25, 0.5, 0.75), 10.0  # of local models, and their ridge
LOCAL_RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # rows' worth of mean curvature
GLOBAL_RIDGES = (0.0, 1.0, 10.0, 100.0)  # likewise
CURVE_RIDGES = (0.0, 1.0, 10.0)  # factors on the ridge of curves that their likelihood suggests
START_CURVE_RIDGE, MAX_CURVE_RIDGE, CURVE_STEPS = 1e-2, 1e3, 30  # shares of the curvature
MIN_RIDGE = 1e-9  # rows' worth of mean curvature per row: holds directions that no row sees
MIN_WEIGHT = 0.01  # of a candidate in the average
PROPOSED_SHARE = 0.5  # of the belief in the candidates whose factor is 1, before any row was left out
CURVED_BELIEF = 0.05  # likewise, in splines: their variances have seen the rows that are left out
MIN_CLIENTS_FOR_NOISE = 3  # whose noise variances show how much these differ
SCALAR, INTERCEPT, DIAGONAL = "scalar", "intercept", "diagonal"
LOCAL, GRID, MIXTURE = "local", "grid", "mixture"

FINE, LOSSES, LIKELIHOODS = 1e-8, 1e-6, 1e-3  # quanta
SIZES = Step("sizes", "rows in all, and how many clients have how many rows, by powers of two", 1.0)
MOMENTS = Step("moments", "second moments of columns and target, for the global model", FINE)
GRADIENT = Step("gradient", "loss and gradient at a model that all clients know", FINE, times=MAX_GRADIENTS)
HESSIAN = Step("hessian", "curvature at a model that all clients know", FINE, times=MAX_HESSIANS)
RIDGE = Step("ridge", "losses of global models with different ridges, each row left out", LOSSES)
NOISE = Step("noise", "residual variances of local models, and how much these differ", LOSSES, linear=False)
SPREAD = Step("spread", "likelihoods of between-client variances", LIKELIHOODS, linear=False)
VARIANCE = Step("variance", "between-client variance of each coefficient", 1e-4, linear=False, times=VARIANCE_STEPS)
CANDIDATES = Step("candidates", "losses of models between global and local, each row left out", LOSSES, linear=False)
DIFFERENCES = Step("differences", "squared differences of these losses from the best ones", LOSSES, linear=False)

STEPS_OF_A_CENTER, STEPS_OF_A_SPREAD = (GRADIENT, HESSIAN, RIDGE), (NOISE, SPREAD, VARIANCE)  # in order


class Candidate(NamedTuple):
    """How a client's model is fitted."""

    kind: str
    value: float  # factor on the variances, variance, share of the local model, or ridge
    columns: str = LINEAR  # the set of columns


class Shape(NamedTuple):
    """The models' coefficients: what all clients know before the first sum of this program."""

    family: Family
    columns: int  # p, the intercept included
    intercept: bool
    ridge: float  # of the task, per row
    numeric: tuple[int, ...] = ()  # columns that may have curves

    @property
    def features(self) -> int:
        """How many columns are no intercept."""
        return self.columns - self.intercept

    @property
    def dim(self) -> int:
        return self.columns * self.family.scores

    @property
    def slopes(self) -> np.ndarray:
        """[D]: whether a coefficient is not an intercept."""
        out = np.ones(self.dim, bool)
        if self.intercept:
            out[-self.family.scores :] = False
        return out


class ColumnSet(NamedTuple):
    """A set of columns that models may use."""

    name: str
    shape: Shape
    place: np.ndarray  # [D]: where its coefficients lie among those of all columns
    curves: tuple[np.ndarray, ...] = ()  # the coefficients of each curve


class Budget(NamedTuple):
    """Which counted steps a federation affords."""

    spread: bool  # one variance for all, with noise
    intercept: bool
    evidence: bool
    candidates: bool
    variance_steps: int


class SetFit(NamedTuple):
    """What all clients know of models on a set of columns."""

    columns: ColumnSet
    center: Center
    curvature: np.ndarray  # [D, D], of all rows' losses, ridge included
    ridge: np.ndarray  # [D], of the global model
    loss: float  # of the global model: mean over all rows, each left out
    noise: float  # typical dispersion
    variances: dict[str, np.ndarray]  # by kind: [D]
    pulled: Center | None = None  # the center of the models with a variance per coefficient


class Federation(NamedTuple):
    """What all clients know of their federation."""

    clients: int
    rows: int
    w: np.ndarray  # [D], the global model
    global_loss: float  # mean over all rows, each left out
    fits: dict[str, SetFit]  # by set of columns
    weights: dict[Candidate, float] | None  # None where each client weighs its own
    losses: dict[Candidate, float] | None  # mean losses of the candidates
    budget: Budget
    used: frozenset[str]  # sets of columns of local, global and personal models
    columns: ShapedColumns | None = None  # that models have besides those of the table
    extra: int = 0  # how many such columns were tried


class ClientModels(NamedTuple):
    """What a client has of its own models; nothing of it is sent."""

    local: HomeFit
    global_: HomeFit
    personal: HomeFit
    dispersion: float
    weights: dict[Candidate, float]

    def on(self, place: np.ndarray | slice) -> ClientModels:
        """The models on some of their coefficients, the others being 0."""
        local, global_, personal = (fit._replace(v=fit.v[place]) for fit in (self.local, self.global_, self.personal))
        return self._replace(local=local, global_=global_, personal=personal)


def check_rows(total: np.ndarray, coefficients: int) -> float:
    """Return how many rows there are at least without the two largest clients; refuse federations whose sums would show
    single rows, because these are too few."""
    rows, classes = total[0], np.rint(total[1:]).astype(int)
    sizes = np.repeat(2.0 ** np.arange(SIZE_CLASSES), classes)[::-1]  # a client of a class has at least so many
    if len(sizes) < MIN_CLIENTS:
        raise RequestError(f"{len(sizes)} clients are too few; at least {MIN_CLIENTS} must take part.")
    if sizes[0] > MAX_SHARE * max(rows, 1.0):
        raise RequestError("one client has more than half of all rows, so that sums would nearly be its own.")
    others, needed = sizes[2:].sum(), ROWS_PER_COEFFICIENT * (coefficients + 1)
    if others < needed:
        raise RequestError(
            f"the clients have too few rows for {coefficients} coefficients: besides the two largest clients {needed} "
            f"rows are needed, and there may be only {others:.0f}. Leave columns out with `drop`, or wait for more "
            "clients."
        )
    return float(others)


def size_numbers(rows: int) -> np.ndarray:
    """Return [1 + SIZE_CLASSES]: a client's rows and its class."""
    out = np.zeros(1 + SIZE_CLASSES)
    out[0] = rows
    out[1 + min(max(rows, 1).bit_length() - 1, SIZE_CLASSES - 1)] = 1
    return out


def candidates_of(budget: Budget, columns: Sequence[str] = (LINEAR,)) -> list[Candidate]:
    """Return the models between global and local that each client tries, and its local ones, on sets of columns."""
    if not budget.spread:
        pulled = [(GRID, float(t)) for t in VARIANCES]
    else:
        kinds = [SCALAR, *([INTERCEPT] * budget.intercept), *([DIAGONAL] * (budget.variance_steps > 0))]
        pulled = [(kind, factor) for kind in kinds for factor in FACTORS] + [(GRID, t) for t in FIXED_VARIANCES]
    pulled += [(MIXTURE, share) for share in MIXTURE_SHARES]
    each = [*pulled, *((LOCAL, ridge) for ridge in LOCAL_RIDGES)]
    return [Candidate(kind, value, name) for name in columns for kind, value in each]


def expanded_shape(shape: Shape, extra: int) -> Shape:
    """Return the shape with so many spline columns."""
    return shape._replace(columns=shape.columns + extra)


def column_sets(shape: Shape, extra: int, bases: Sequence[int] = ()) -> list[ColumnSet]:
    """Return the table's columns as a set, and these with the spline columns where there are any, of these columns."""
    k, large = shape.family.scores, expanded_shape(shape, extra)
    slopes, place = shape.features * k, np.arange(large.dim)
    linear = np.concatenate([place[:slopes], place[large.features * k :]])
    sets = [ColumnSet(LINEAR, shape, linear)]
    owner = np.repeat(np.array(bases), k)
    curves = tuple(slopes + np.flatnonzero(owner == base) for base in dict.fromkeys(bases))
    return [*sets, ColumnSet(SPLINE, large, place, curves)] if extra else sets


def estimate_program(
    shape: Shape, homes: Sequence[HomeRows], budget_of: Callable[[int, Sequence[Shape]], Budget]
) -> Program[tuple[Federation, list[ClientModels]]]:
    """Estimate the federation's numbers and the models of a cohort's clients; an observer has no client.

    `budget_of(clients, shapes of the sets of columns)` decides which steps are affordable.
    """
    total = yield Sum(SIZES, _stack([size_numbers(len(home.y)) for home in homes], 1 + SIZE_CLASSES))
    others = check_rows(total, shape.dim)
    rows, m = int(total[0]), round(float(total[1:].sum()))
    if any(len(home.y) > MAX_SHARE * rows for home in homes):
        raise RequestError("this client has more than half of all rows, so that sums would nearly be its own.")
    columns = None
    if shape.numeric and rows >= MIN_ROWS_FOR_CURVES * shape.family.scores:
        most = (others / ROWS_PER_COEFFICIENT - 1) / shape.family.scores - shape.columns
        columns = yield from columns_program(homes, shape.features, shape.numeric, most)
    bases = [] if columns is None else [column.bases[0] for column in columns.groups]
    sets = column_sets(shape, len(bases), bases)
    if columns is not None:
        homes = [expand(home, columns) for home in homes]
    moments = yield from _sum_moments(sets[-1].shape, homes)
    parts = [[home.select(part.place) for home in homes] for part in sets]
    programs = [_fit_center(part, own, moments, rows) for part, own in zip(sets, parts)]
    fits = yield from side_by_side(programs, STEPS_OF_A_CENTER)
    budget: Budget = budget_of(m, [part.shape for part in sets])
    if len(sets) > 1 and not budget.candidates:  # the global models' losses choose the set
        best = min(range(len(sets)), key=lambda k: fits[k].loss)
        alone = sets[best]._replace(place=np.arange(sets[best].shape.dim))
        sets, parts, fits = [alone], [parts[best]], [fits[best]._replace(columns=alone)]
        budget = budget_of(m, [alone.shape])
    spreads = [_estimate_spread(fit, own, budget, m) for fit, own in zip(fits, parts)]
    ended = yield from side_by_side(spreads, STEPS_OF_A_SPREAD)
    federation, models = yield from _weigh_candidates(ended, parts, budget, m, rows)
    if SPLINE not in federation.used:
        columns = None
        place = column_sets(shape, len(bases), bases)[0].place if len(federation.w) > shape.dim else slice(None)
        federation = federation._replace(w=federation.w[place])
        models = [model.on(place) for model in models]
    return federation._replace(columns=columns, extra=len(bases)), models


def _fit_center(columns: ColumnSet, homes: Sequence[HomeRows], moments: Moments, rows: int) -> Program[SetFit]:
    """The global model on a set of columns."""
    shape = columns.shape
    w, curvature = yield from _fit_global(shape, homes, rows, moments.on(columns))
    curves = _curve_ridge(columns, w, curvature, moments.noise(rows), rows)
    center, loss, ridge = yield from _choose_ridge(shape, homes, rows, w, curvature, curves)
    curvature, ridge = curvature + np.diag(ridge), ridge + shape.ridge * rows
    return SetFit(columns, center, curvature, ridge, loss, 1.0, {})


def _estimate_spread(
    fit: SetFit, homes: Sequence[HomeRows], budget: Budget, m: int
) -> Program[tuple[SetFit, list[float]]]:
    """How much models on a set of columns vary between clients, and the dispersions of a cohort's clients."""
    shape, center, curvature = fit.columns.shape, fit.center, fit.curvature
    noise, dispersions = yield from _estimate_noise(shape, homes, budget, fit.loss)
    variances: dict[str, np.ndarray] = {}
    others = [_others(home, center, curvature) for home in homes]
    scale = m / (m - 1)
    if budget.spread:
        grids = [np.ones(shape.dim)] + ([(~shape.slopes).astype(float)] if budget.intercept else [])
        likelihoods = _stack(
            [
                np.array([_likelihood(home, other, scale * t * unit, phi, noise) for unit in grids for t in VARIANCES])
                for home, other, phi in zip(homes, others, dispersions)
            ],
            len(grids) * len(VARIANCES),
        )
        likelihoods -= likelihoods.max(1, initial=-np.inf, keepdims=True) if len(likelihoods) else 0.0
        total = yield Sum(SPREAD, likelihoods)
        for kind, unit, part in zip((SCALAR, INTERCEPT), grids, np.split(total, len(grids))):
            variances[kind] = _best_variance(part) * unit
    if budget.variance_steps:
        pulled, variances[DIAGONAL] = yield from _estimate_diagonal(
            fit, homes, dispersions, noise, variances, budget, m
        )
        fit = fit._replace(pulled=pulled)
    return fit._replace(noise=noise, variances=variances), dispersions


def _stack(parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """[C, width]."""
    return np.stack(parts) if parts else np.zeros((0, width))


def _triangle(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(len(matrix))]


def _square(numbers: np.ndarray, order: int) -> np.ndarray:
    out = np.zeros((order, order))
    out[np.triu_indices(order)] = numbers
    return out + np.triu(out, 1).T


def _mean_curvature(curvature: np.ndarray, rows: int) -> float:
    """Per coefficient and row."""
    return float(np.trace(curvature)) / (len(curvature) * rows)


class Moments(NamedTuple):
    """Second moments over all rows."""

    gram: np.ndarray  # [p, p], of the columns
    targets: np.ndarray  # [p] with the target where it is a number, else [K]: how often there is which class
    square: float  # of targets that are numbers

    def on(self, columns: ColumnSet) -> Moments:
        k = columns.shape.family.scores
        place = columns.place[::k] // k
        targets = self.targets[place] if columns.shape.family.has_noise else self.targets
        return self._replace(gram=self.gram[np.ix_(place, place)], targets=targets)

    def noise(self, rows: int) -> float:
        """The variance around the pooled model; 1 for other losses."""
        if not self.square:
            return 1.0
        explained = self.targets @ np.linalg.lstsq(self.gram, self.targets, rcond=1e-10)[0]
        return max(float(self.square - explained), 1e-12 * self.square) / max(rows - len(self.targets), 1)


def _sum_moments(shape: Shape, homes: Sequence[HomeRows]) -> Program[Moments]:
    k, p = shape.family.scores, shape.columns
    size, is_linear = p * (p + 1) // 2, shape.family.has_noise
    plain = [home.jacobian[:, 0, ::k] for home in homes]  # the columns
    targets = [
        np.append(x.T @ home.y, home.y @ home.y) if is_linear else _count_targets(home) for x, home in zip(plain, homes)
    ]
    parts = [np.concatenate([_triangle(x.T @ x), target]) for x, target in zip(plain, targets)]
    total = yield Sum(MOMENTS, _stack(parts, size + (p + 1 if is_linear else k)))
    gram, numbers = _square(total[:size], p), total[size:]
    return Moments(gram, numbers[:p], float(numbers[p])) if is_linear else Moments(gram, numbers, 0.0)


def _fit_global(
    shape: Shape, homes: Sequence[HomeRows], rows: int, moments: Moments
) -> Program[tuple[np.ndarray, np.ndarray]]:
    """The model that minimizes all rows' losses with the task's ridge, and the curvature there."""
    k, d = shape.family.scores, shape.dim
    if shape.family.has_noise:
        curvature = moments.gram + shape.ridge * rows * np.eye(d)
        return solve(_held(curvature, rows), moments.targets), curvature
    w = np.zeros(d)
    mean = np.clip(moments.targets / rows, 1e-3, None)
    bound = shape.family.bound
    if shape.intercept:
        is_share = bound is not None and k == 1
        w[-k:] = np.log(mean) - (np.log(np.clip(1 - mean, 1e-3, None)) if is_share else 0.0)
    bend = float(mean[0]) if bound is None else bound
    curvature = np.kron(moments.gram, bend * np.eye(k)) + shape.ridge * rows * np.eye(d)
    return (yield from _iterate_global(shape, homes, rows, w, curvature))


def _held(curvature: np.ndarray, rows: int) -> np.ndarray:
    """The curvature with the least ridge, which holds directions that no row sees."""
    return curvature + MIN_RIDGE * rows * max(_mean_curvature(curvature, rows), 1e-12) * np.eye(len(curvature))


def _count_targets(home: HomeRows) -> np.ndarray:
    """[K]: the sum of the targets, or how often each class occurs."""
    if home.family.scores == 1:
        return np.array([home.y.sum()])
    return np.bincount(home.y.astype(int), minlength=home.family.scores).astype(float)


def _iterate_global(
    shape: Shape, homes: Sequence[HomeRows], rows: int, w: np.ndarray, curvature: np.ndarray
) -> Program[tuple[np.ndarray, np.ndarray]]:
    """Quasi-Newton steps from pooled gradients, with one Hessian on the way and one at the end."""
    ridge, d = shape.ridge * rows, shape.dim
    best, last = np.inf, None
    for number in range(MAX_GRADIENTS):
        if number == GRADIENTS_BEFORE_HESSIAN:
            curvature = (yield from _hessian(shape, homes, w)) + ridge * np.eye(d)
        parts = []
        for home in homes:
            z = home.scores(w)
            slope = home.pull_back(home.family.slope(z, home.y))
            parts.append(np.concatenate([[home.family.nll(z, home.y).sum()], slope]))
        total = yield Sum(GRADIENT, _stack(parts, 1 + d))
        loss, gradient = total[0] + ridge / 2 * w @ w, total[1:] + ridge * w
        if last is not None and loss > best + 1e-9 * abs(best):
            w = last[0] + BACKTRACK * (w - last[0])
            continue
        if last is not None and number != GRADIENTS_BEFORE_HESSIAN:
            curvature = _update_curvature(curvature, w - last[0], gradient - last[1])
        step = solve(_held(curvature, rows), gradient)
        best, last = loss, (w, gradient)
        w = w - step
        if float(gradient @ step) < STEP_TOLERANCE:
            break
    return w, (yield from _hessian(shape, homes, w)) + ridge * np.eye(d)


def _hessian(shape: Shape, homes: Sequence[HomeRows], w: np.ndarray) -> Program[np.ndarray]:
    d = shape.dim
    parts = [_triangle(home.gram(home.family.bend(home.scores(w), home.y))) for home in homes]
    return _square((yield Sum(HESSIAN, _stack(parts, d * (d + 1) // 2))), d)


def _update_curvature(curvature: np.ndarray, moved: np.ndarray, change: np.ndarray) -> np.ndarray:
    """By Broyden, Fletcher, Goldfarb and Shanno's rule."""
    along, seen = float(change @ moved), curvature @ moved
    if not along > 1e-10 * float(moved @ seen):
        return curvature
    return curvature - np.outer(seen, seen) / (moved @ seen) + np.outer(change, change) / along


def _choose_ridge(
    shape: Shape, homes: Sequence[HomeRows], rows: int, w: np.ndarray, curvature: np.ndarray, curves: np.ndarray
) -> Program[tuple[Center, float, np.ndarray]]:
    """The global model with the ridge of least loss on left-out rows, that loss, and the ridge. `curves` [D] is a
    ridge on spline columns, which comes with several factors."""
    centers, unit = [], _mean_curvature(curvature, rows)
    for factor in GLOBAL_RIDGES:
        for curve_factor in CURVE_RIDGES if curves.any() else (0.0,):
            ridge = factor * unit * shape.slopes + curve_factor * curves
            held = _held(curvature + np.diag(ridge), rows)
            centers.append((Center(solve(held, curvature @ w), np.linalg.inv(held)), ridge))
    parts = [np.array([_held_out_loss(home, center) for center, _ in centers]) for home in homes]
    total = (yield Sum(RIDGE, _stack(parts, len(centers)))) / rows
    best = int(total.argmin())
    return centers[best][0], float(total[best]), centers[best][1]


def _curve_ridge(columns: ColumnSet, w: np.ndarray, curvature: np.ndarray, noise: float, rows: int) -> np.ndarray:
    """[D]: the ridge on the coefficients of each curve that maximizes their likelihood, by Fellner and Schall's steps:
    r <- noise (k - r tr V) / |w|^2 for k coefficients w with covariance noise V."""
    ridge = np.zeros(len(w))
    largest = MAX_CURVE_RIDGE * np.diag(curvature).max()
    for place in columns.curves:
        ridge[place] = START_CURVE_RIDGE * np.diag(curvature)[place].mean()
    for _ in range(CURVE_STEPS if columns.curves else 0):
        inverse = np.linalg.inv(_held(curvature + np.diag(ridge), rows))
        fitted = inverse @ (curvature @ w)
        for place in columns.curves:
            free = max(len(place) - ridge[place[0]] * np.diag(inverse)[place].sum(), 1e-6)
            ridge[place] = min(noise * free / max(float(fitted[place] @ fitted[place]), 1e-12), largest)
    return ridge


def _held_out_loss(home: HomeRows, center: Center) -> float:
    return float(home.family.risk(global_fit(home, center).without, home.y).sum())


def global_fit(home: HomeRows, center: Center, moves: np.ndarray | None = None) -> HomeFit:
    """Return the global model at a client."""
    moves = center_moves(home, center) if moves is None else moves
    z = home.scores(center.w)
    return HomeFit(center.w, z, z + np.einsum("nkd,nd->nk", home.jacobian, moves))


def _estimate_noise(
    shape: Shape, homes: Sequence[HomeRows], budget: Budget, loss: float
) -> Program[tuple[float, list[float]]]:
    """The typical dispersion, and each client's own."""
    family = shape.family
    if not (family.has_noise or family.is_dispersed):
        return 1.0, [1.0] * len(homes)
    own = [_residuals(shape, home) for home in homes]
    typical = loss if family.has_noise else 1.0
    if not budget.spread:  # all that is known of the others is how far they are from the global model
        return typical, [(typical + square) / (1 + freedom) for square, freedom in own]
    values = torch.tensor([[square / max(freedom, 1e-9), freedom] for square, freedom in own]).double().reshape(-1, 2)
    logs = variance_log_sums(values[:, 0], values[:, 1], (values[:, 1] >= 1) & (values[:, 0] > 0))
    total = yield Sum(NOISE, np.concatenate([logs.numpy(), np.array(own, float).reshape(-1, 2)], 1))
    if total[5] > 0:
        typical = max(total[4] / total[5], 1e-12)
    if family.is_dispersed:
        return max(typical, 1.0), [max(typical, 1.0)] * len(homes)
    if total[0] < MIN_CLIENTS_FOR_NOISE:
        return typical, [typical] * len(homes)
    strength, scale = (float(part) for part in variance_prior(torch.from_numpy(total[:4])))
    scale = min(scale, typical)
    return typical, [(strength * scale + square) / (strength + freedom) for square, freedom in own]


def _residuals(shape: Shape, home: HomeRows) -> tuple[float, float]:
    """The sum of squared residuals of the client's own fit, in units of variance, and its degrees of freedom."""
    ridge = np.where(shape.slopes, LOCAL_RIDGES[0], 1e-6) * _row_curvature(home, np.zeros(home.dim))
    free, zero = np.ones(home.dim, bool), np.zeros((len(home.y), home.family.scores))
    v, curvature = minimize(home, zero, free, ridge, 1.0)
    z = home.scores(v)
    bend = home.family.bend(z, home.y)
    used = float(np.trace(solve(curvature, home.gram(bend))))
    square = float((home.family.slope(z, home.y)[:, 0] ** 2 / np.maximum(bend[:, 0, 0], 1e-12)).sum())
    return square, max(len(home.y) - used, 0.0)


def _row_curvature(home: HomeRows, w: np.ndarray) -> float:
    """The mean curvature of a row and coefficient."""
    gram = home.gram(home.family.bend(home.scores(w), home.y))
    return max(float(np.trace(gram)) / (home.dim * max(len(home.y), 1)), 1e-9)


class _Others(NamedTuple):
    """The global model of the other clients, and the inverse of its curvature."""

    w: np.ndarray
    inverse: np.ndarray


def _others(home: HomeRows, center: Center, curvature: np.ndarray) -> _Others:
    z = home.scores(center.w)
    remaining = curvature - home.gram(home.family.bend(z, home.y))
    values, vectors = np.linalg.eigh(remaining)
    least = 1e-6 * max(float(values[-1]), 1e-12)  # directions that only this client has seen are not known
    inverse = (vectors / np.maximum(values, least)) @ vectors.T
    return _Others(center.w + inverse @ home.pull_back(home.family.slope(z, home.y)), inverse)


def _posterior(
    home: HomeRows, others: _Others, variance: np.ndarray, dispersion: float, noise: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """b, M and the prior's precision and covariance, of the client's coefficients around the others' model."""
    covariance = np.diag(variance) + noise * others.inverse
    precision = solve(covariance, np.eye(len(covariance)))
    precision = (precision + precision.T) / 2
    b, curvature = minimize(home, home.scores(others.w), np.ones(home.dim, bool), precision, dispersion)
    return b, curvature, precision, covariance


def _likelihood(home: HomeRows, others: _Others, variance: np.ndarray, dispersion: float, noise: float) -> float:
    b, curvature, precision, covariance = _posterior(home, others, variance, dispersion, noise)
    fit = home.family.nll(home.scores(others.w + b), home.y).sum() / dispersion + b @ precision @ b / 2
    return -float(fit + (np.linalg.slogdet(curvature)[1] + np.linalg.slogdet(covariance)[1]) / 2)


def _estimate_diagonal(
    fit: SetFit,
    homes: Sequence[HomeRows],
    dispersions: Sequence[float],
    noise: float,
    variances: dict[str, np.ndarray],
    budget: Budget,
    m: int,
) -> Program[tuple[Center, np.ndarray]]:
    """The center that all clients' models are pulled to, and a between-client variance per coefficient."""
    d, w, t = fit.columns.shape.dim, fit.center.w, np.maximum(variances[SCALAR], START_VARIANCE)
    ridge = fit.ridge / noise
    if fit.columns.shape.family.has_noise:  # the global model's ridge suits its noise, which is far larger
        curved = np.isin(np.arange(d), np.concatenate([[], *fit.columns.curves]))
        ridge = np.where(curved, fit.ridge / fit.loss, 0.0)
    share, last, tried = (fit.curvature - np.diag(fit.ridge)) / (m * noise), np.inf, w
    move, length, ratio = np.zeros(d), 1.0, np.ones(d)
    total = _pulled_curvature(share, t, m, np.ones(d))
    for _ in range(budget.variance_steps):
        inverse = np.linalg.inv(total + np.diag(ridge))
        scores = [_variance_score(home, tried, t, inverse, phi) for home, phi in zip(homes, dispersions)]
        score, squares, expected = np.split((yield Sum(VARIANCE, _stack(scores, 3 * d))), 3)
        seen = expected / t * m / (m - 1)
        total = _pulled_curvature(share, t, m, np.clip(seen / np.maximum(np.diag(total), 1e-12), 0.01, 100.0))
        gradient = score / np.sqrt(t) - ridge * tried
        next_move = solve(total + np.diag(ridge), gradient)
        size = float(gradient @ next_move)
        if size > GROWTH * last:  # clients whose curvature is far from an equal share: the step was too long
            length, last = length / 2, size
            tried = w + length * move
            continue
        w, move, last, length = tried, next_move, size, min(2 * length, 1.0)
        tried = w + length * move
        ratio = np.where(expected > 0, squares / np.maximum(expected, 1e-12), 1.0)
        ratio = np.clip(ratio, 1 / MAX_VARIANCE_CHANGE, MAX_VARIANCE_CHANGE)
        t = np.maximum(t * ratio, MIN_VARIANCE)
        changed = np.abs(np.log(ratio[t > MIN_VARIANCE])).max(initial=0.0)
        if size < CENTER_TOLERANCE and changed < VARIANCE_TOLERANCE:
            break
    if not np.abs(w).max() < MAX_COEFFICIENT:
        w = fit.center.w
    total = _pulled_curvature(share, t, m, np.ones(d))
    return Center(w, np.linalg.inv(total + np.diag(ridge)), True), t


def _pulled_curvature(share: np.ndarray, t: np.ndarray, m: int, weight: np.ndarray) -> np.ndarray:
    """The curvature of the center of m clients that have `share` K of all rows' each: m (K^-1 + T)^-1, with weights [D]
    on its diagonal."""
    root = np.sqrt(t)
    values, vectors = np.linalg.eigh(root[:, None] * share * root)  # (K^-1 + T)^-1 = T^-1/2 (1 - 1/(1 + .)) T^-1/2
    values = np.maximum(values, 1e-12)
    kept = m * (vectors * (values / (1 + values))) @ vectors.T
    scale = np.sqrt(weight) / root
    return scale[:, None] * kept * scale


def _variance_score(home: HomeRows, w: np.ndarray, t: np.ndarray, inverse: np.ndarray, dispersion: float) -> np.ndarray:
    """[3 D]: the score u of the center times the root of t, t u^2 and t (P - P A^-1 P)_jj with the variance P of u."""
    root = np.sqrt(t)
    b, curvature = minimize(home, home.scores(w), np.ones(home.dim, bool), 1 / t, dispersion)
    score = b / root
    inner = root[:, None] * curvature * root  # 1 + T^1/2 K T^1/2
    scaled = np.eye(len(t)) - solve(inner, np.eye(len(t)))  # T^1/2 P T^1/2
    outer = inverse / np.outer(root, root)
    expected = np.diag(scaled) - np.einsum("ij,jk,ki->i", scaled, outer, scaled)
    values = np.concatenate([score, score**2, np.maximum(expected, 0.0)])
    return np.clip(np.nan_to_num(values), -MAX_SCORE, MAX_SCORE)


def _best_variance(likelihoods: np.ndarray) -> float:
    """The variance of the largest likelihood, by a parabola through its neighbors on the log scale."""
    k = int(likelihoods.argmax())
    logs = np.log(VARIANCES)
    if 0 < k < len(logs) - 1:
        left, middle, right = likelihoods[k - 1 : k + 2]
        bend = left - 2 * middle + right
        move = 0.5 * (left - right) / bend if bend < 0 else 0.0
        return float(np.exp(logs[k] + np.clip(move, -1, 1) * (logs[1] - logs[0])))
    return float(VARIANCES[k])


def _fit_candidate(
    fit: SetFit, rows: int, home: HomeRows, candidate: Candidate, dispersion: float, moves: np.ndarray
) -> HomeFit:
    shape, value = fit.columns.shape, candidate.value
    if candidate.kind == MIXTURE:
        local = _fit_candidate(fit, rows, home, Candidate(LOCAL, MIXTURE_RIDGE), dispersion, moves)
        other = global_fit(home, fit.center, moves)
        return HomeFit(*(value * own + (1 - value) * shared for own, shared in zip(local, other)))
    if candidate.kind == LOCAL:
        plain = np.setdiff1d(np.arange(shape.dim), np.concatenate([[], *fit.columns.curves]))  # whose ridge is small
        unit = float(np.diag(fit.curvature)[plain].mean()) / rows
        ridge = np.where(shape.slopes, value, min(value, LOCAL_RIDGES[0])) * unit
        return fit_local(home, ridge / dispersion, dispersion)
    variance = np.full(shape.dim, 1.0) if candidate.kind == GRID else fit.variances[candidate.kind]
    if candidate.kind == DIAGONAL and fit.pulled is not None:
        return fit_pulled(home, fit.pulled, value * variance, dispersion)
    return fit_pulled(home, fit.center, value * variance, dispersion, moves)


def _weigh_candidates(
    fits: list[tuple[SetFit, list[float]]],
    parts: list[list[HomeRows]],
    budget: Budget,
    m: int,
    rows: int,
) -> Program[tuple[Federation, list[ClientModels]]]:
    """All candidates of every client, and their weights: by all clients' losses, or by its own ones."""
    sets = {fit.columns.name: fit for fit, _ in fits}
    candidates, best_set = candidates_of(budget, list(sets)), min(sets.values(), key=lambda fit: fit.loss)
    family, dim = best_set.columns.shape.family, fits[-1][0].columns.shape.dim
    count = len(parts[0])
    own: list[dict[Candidate, HomeFit]] = [{} for _ in range(count)]
    global_: list[HomeFit] = []
    for (fit, dispersions), homes in zip(fits, parts):
        for i, (home, phi) in enumerate(zip(homes, dispersions)):
            moves = center_moves(home, fit.center)
            for c in candidates:
                if c.columns == fit.columns.name:
                    own[i][c] = _embed(_fit_candidate(fit, rows, home, c, phi, moves), fit.columns, dim)
            if fit is best_set:
                global_.append(_embed(global_fit(home, fit.center, moves), fit.columns, dim))
    largest = MAX_LOSS_RATIO * best_set.loss
    losses = [
        np.stack(
            [np.nan_to_num(family.risk(fit.without, home.y), nan=largest).clip(max=largest) for fit in one.values()]
        )
        for home, one in zip(parts[0], own)
    ]
    heat = 2 * (best_set.loss if family.has_noise else best_set.noise)
    heat = heat if family.has_noise or family.is_dispersed else 1.0
    local_places = [k for k, c in enumerate(candidates) if c.kind == LOCAL]
    named, means = None, None
    if budget.candidates:
        total = yield Sum(CANDIDATES, _stack([loss.sum(1) for loss in losses], len(candidates)))
        best = int(total.argmin())
        if family.has_noise:
            heat = 2 * total[best] / rows
        square = yield Sum(DIFFERENCES, _stack([((loss - loss[best]) ** 2).sum(1) for loss in losses], len(candidates)))
        weights = _posterior_weights(candidates, total - total[best], square, rows, heat)
        means = dict(zip(candidates, (total / rows).tolist()))
        named = dict(zip(candidates, weights.tolist()))
        local = min(local_places, key=lambda k: float(total[k]))
        chosen = [(weights, local)] * max(count, 1)
    else:
        chosen = []
        for loss in losses:
            total = loss.sum(1)
            best = int(total.argmin())
            square = ((loss - loss[best]) ** 2).sum(1)
            weights = _posterior_weights(candidates, total - total[best], square, loss.shape[1], heat)
            chosen.append((weights, min(local_places, key=lambda k: float(total[k]))))
    models = []
    for i, (weights, local) in enumerate(chosen[:count]):
        values = list(own[i].values())
        mixed = [sum(w * getattr(fit, name) for w, fit in zip(weights, values) if w > 0) for name in HomeFit._fields]
        personal = HomeFit(*mixed)  # type: ignore[arg-type]
        used = {c: float(w) for c, w in zip(candidates, weights) if w > 0}
        dispersion = fits[0][1][i]
        models.append(ClientModels(values[local], global_[i], personal, dispersion, used))
    w = np.zeros(dim)
    w[best_set.columns.place] = best_set.center.w
    used_sets = {best_set.columns.name, *(candidates[local].columns for _, local in chosen)}
    if named is None:
        used_sets |= set(sets)
    else:
        used_sets |= {c.columns for c, weight in named.items() if weight > 0}
    federation = Federation(m, rows, w, best_set.loss, sets, named, means, budget, frozenset(used_sets))
    return federation, models


def _embed(fit: HomeFit, columns: ColumnSet, dim: int) -> HomeFit:
    """The fit as one on all columns."""
    v = np.zeros(dim)
    v[columns.place] = fit.v
    return fit._replace(v=v)


def _posterior_weights(
    candidates: list[Candidate], total: np.ndarray, square: np.ndarray, rows: int, heat: float
) -> np.ndarray:
    """[candidates]: by their belief before rows were left out, and by what these add."""
    proposed = np.array([c.kind in (SCALAR, INTERCEPT, DIAGONAL) and c.value == 1.0 for c in candidates])
    share = PROPOSED_SHARE if proposed.any() else 0.0
    belief = np.where(proposed, share / max(proposed.sum(), 1), (1 - share) / max((~proposed).sum(), 1))
    deficit = log_likelihood_deficits(torch.from_numpy(total), torch.from_numpy(square), rows, heat).numpy()
    curved = np.array([c.columns == SPLINE for c in candidates])
    if curved.any() and not curved.all():
        belief = belief * np.where(curved, CURVED_BELIEF, 1 - CURVED_BELIEF)
    weight = belief * np.exp(-(deficit - deficit.min()))
    weight = np.where(weight < MIN_WEIGHT * weight.sum(), 0.0, weight)
    return weight / weight.sum()


def loss_sums(homes: Sequence[HomeRows], models: Sequence[ClientModels]) -> tuple[LossSums, LossSums]:
    """Return the sums over left-out rows, and those over all rows with the models that clients would use."""
    held = [
        _sum_losses(home, [model.local.without, model.global_.without, model.personal.without])
        for home, model in zip(homes, models)
    ]
    own = [_sum_losses(home, [model.local.z, model.global_.z, model.personal.z]) for home, model in zip(homes, models)]
    return _join(held), _join(own)


def _join(parts: list[tuple[np.ndarray, ...]]) -> LossSums:
    if not parts:
        return zero_sums(0)
    return LossSums(*(torch.from_numpy(np.stack(column)) for column in zip(*parts)))


def _sum_losses(home: HomeRows, scores: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """A client's `LossSums`, of the scores by its three models."""
    local, global_, personal = scores
    risk, divergence = home.family.risk, home.family.divergence
    loss = np.stack([risk(z, home.y) for z in scores], 1)
    difference = loss[:, :2] - loss[:, 2:]
    apart = np.stack([divergence(z, personal) for z in (local, global_)], 1)
    deviation = difference - apart
    return (
        np.array(float(len(home.y))),
        loss.sum(0),
        np.array((loss[:, 2] ** 2).sum()),
        difference.sum(0),
        apart.sum(0),
        (apart**2).sum(0),
        np.array(divergence(global_, local).sum()),
        np.concatenate([(deviation**2).sum(0), [deviation.prod(1).sum()]]),
    )
