"""One recommendation per client: the simplest model that is practically the same as its personal one.

A client's local (or global) model is practically the same as its personal model when its mean divergence from it, one
standard error added, is at most `margin` times the pooled held-out loss of the personal models, both over the client's
own rows and over its held-out rows with models that have not seen them: a local fit to few rows agrees there with any
model that fits them, and may be far from it at the next one. If both models are the same, the closer one is
recommended; if neither is, the personal model.

The guard, in two steps, each for a group of clients whose held-out rows show one model to be worse than another by more
than GUARD_MARGINS margins beyond one standard error (clustered by client). The clients that would get one kind of
simpler model: if it is worse than their personal models, all of them keep these. Then all clients that are not
recommended their local (or the global) model: if what they are recommended is worse than that, they get it.

The federation's line is what held-out rows show: the mean difference of losses over all rows, with Student's interval,
its error clustered by client. Models fitted to all rows differ less, local ones most: the interval includes that of the
differences expected of these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS, PERSONAL, LossSums, pooled_losses
from mooring.advice.inference.improvements import Comparison, Improvements, compare_models, estimate_improvements
from mooring.estimates.clustered_mean import MeanDifference, clustered_mean, mean_difference

DEFAULT_MARGIN = 0.01  # difference too small to matter, as a share of the loss
DEFAULT_LEVEL = 0.95  # of the federation's interval
CLIENT_LEVEL = 0.9  # of a client's: it excludes 0 just where the probability to be better is above HIGH_PROBABILITY
HIGH_PROBABILITY, MODERATE_PROBABILITY = 0.95, 0.8
GUARD_MARGINS = 2.0
SHRINKAGE_ROWS = 10.0  # rows' worth of all clients' losses that a client's own are shrunk by
MAX_FREEDOM_SHARE = 0.95  # degrees of freedom as a share of the rows
SAME_LOSS_SHARE = 1e-9  # share of the loss below which two models' losses are the same
MIN_LOSS_SHARE = 0.01  # of a client's expected loss: no other model is expected to have less


class Recommendations(NamedTuple):
    """What every client should use, and how much better that is. Losses are in the unit of the task."""

    recommended: np.ndarray  # [m] str, one of MODELS
    expected: dict[str, np.ndarray]  # by model: [m], expected losses
    over: dict[str, Comparison]  # by other model: the recommended one against it
    is_same: dict[str, np.ndarray]  # by other model: [m], whether the recommended one is that very model
    loss: dict[str, float]  # by model, and of the recommended ones: mean held-out loss over rows
    line: dict[str, MeanDifference]  # by other model: its held-out loss less that of the recommended models
    personal_line: dict[str, MeanDifference]  # the same of the personal models
    full_line: dict[str, MeanDifference] | None  # that of the personal models, expected of models fitted to all rows


def recommend(
    held: LossSums,
    own: LossSums,
    margin: float = DEFAULT_MARGIN,
    level: float = DEFAULT_LEVEL,
    fitted: LossSums | None = None,
) -> Recommendations:
    """Everyone's recommendation from held-out sums, and from sums over all rows with the models to be used.

    `fitted` are sums over the rows that the held-out models were fitted to.
    """
    improvements = estimate_improvements(held, own)
    loss = pooled_losses(held)
    chosen = choose_models(held, own, margin)
    recommended = recommended_losses(held, chosen)
    over, same = compare_recommended(improvements, chosen, SAME_LOSS_SHARE * abs(loss[PERSONAL]))
    lines, personal = (_mean_differences(held.rows, held.loss, part, level) for part in (recommended, held.loss[:, 2]))
    losses = loss | {"recommended": float(recommended.sum() / held.rows.sum().clamp(min=1))}
    full = None
    if fitted is not None:
        scaled = held._replace(loss=full_size_factors(held, fitted) * held.loss)
        full = _mean_differences(held.rows, scaled.loss, scaled.loss[:, 2], level)
        of_recommended = _mean_differences(held.rows, scaled.loss, recommended_losses(scaled, chosen), level)
        lines, personal = _include(lines, of_recommended), _include(personal, full)
    return Recommendations(chosen, expected_losses(held, improvements), over, same, losses, lines, personal, full)


def _mean_differences(rows: Tensor, losses: Tensor, model: Tensor, level: float) -> dict[str, MeanDifference]:
    """By other model: sums of its losses [m, 3] less those of a model [m], with intervals."""
    return {o: mean_difference(rows, losses[:, k] - model, level) for k, o in enumerate(ALTERNATIVES)}


def _include(lines: dict[str, MeanDifference], others: dict[str, MeanDifference]) -> dict[str, MeanDifference]:
    """The lines, with intervals that include those of the others."""
    return {
        o: MeanDifference(line.mean, min(line.low, others[o].low), max(line.high, others[o].high))
        for o, line in lines.items()
    }


def full_size_factors(held: LossSums, fitted: LossSums) -> Tensor:
    """[m, 3]: what losses of models fitted to all n rows are to those of the folds' models, fitted to n' of them.

    By generalized cross-validation a model of q degrees of freedom has a held-out loss of n'^2 / (n' - q)^2 times its
    loss on the rows that it was fitted to, and one of n' / (n' - q) times the noise. A client's ratio of losses is
    shrunk to that of all clients.
    """
    total = held.rows.sum().clamp(min=1)
    often = (fitted.rows.sum() / total).clamp(min=1)  # how many folds' models are fitted to a row: n' / (n - n')
    seen = fitted.loss / often
    prior = [SHRINKAGE_ROWS * part.sum(0) / total for part in (seen, held.loss)]
    ratio = (seen + prior[0]) / (held.loss + prior[1]).clamp(min=torch.finfo(seen.dtype).tiny)
    used = (1 - ratio.clamp(0, 1).sqrt()).clamp(max=MAX_FREEDOM_SHARE)  # q / n'
    return (1 - used) / (1 - used * often / (often + 1))


def choose_models(held: LossSums, own: LossSums, margin: float = DEFAULT_MARGIN) -> np.ndarray:
    """[m] str: the recommended kinds of model."""
    limit = margin * abs(pooled_losses(held)[PERSONAL])
    closest = torch.maximum(_upper_divergence(own), _upper_divergence(held)).min(1)
    chosen = np.where((closest.values <= limit).numpy(), np.array(ALTERNATIVES)[closest.indices.numpy()], PERSONAL)
    for k, other in enumerate(ALTERNATIVES):
        group = torch.from_numpy(chosen == other) & (held.rows > 0)
        mean, error = _group_mean(held, group, held.difference[:, k])
        if mean - error > GUARD_MARGINS * limit:
            chosen = np.where(chosen == other, PERSONAL, chosen)
    for k, other in enumerate(ALTERNATIVES):
        group = torch.from_numpy(chosen != other) & (held.rows > 0)
        worse = recommended_losses(held, chosen) - held.loss[:, k]
        mean, error = _group_mean(held, group, worse)
        if mean - error > GUARD_MARGINS * limit:
            chosen = np.full_like(chosen, other)
    return chosen


def _upper_divergence(sums: LossSums) -> Tensor:
    """[m, 2]: mean divergences of local and global models over a client's rows, and one standard error; 0 without
    rows."""
    n = sums.rows.clamp(min=1)[:, None]
    mean = sums.divergence / n
    variance = (sums.divergence_square / n - mean**2).clamp(min=0)
    return mean + (variance / (n - 1).clamp(min=1)).sqrt()


def _group_mean(held: LossSums, group: Tensor, sums: Tensor) -> tuple[float, float]:
    """The mean over the rows of a group of clients [m] of clients' sums of differences, and its standard error.

    Of one client alone (a new one) rows are the units of chance: the error is at most that of both differences from the
    personal model together, by the sums of squares of their two parts.
    """
    mean, error = clustered_mean(held.rows[group], sums[group])
    if bool(group.any()) and int((held.rows > 0).sum()) == 1:
        roots = held.deviation[group][0, :2].sqrt() + held.divergence_square[group][0].sqrt()
        error = float(roots.sum() / held.rows[group][0])
    return mean, error


def recommended_losses(held: LossSums, chosen: np.ndarray) -> Tensor:
    """[m]: sums of the held-out losses of the recommended kinds of model."""
    used = torch.from_numpy(np.array([MODEL_KINDS.index(kind) for kind in chosen]))
    return held.loss.gather(1, used[:, None])[:, 0]


def compare_recommended(
    improvements: Improvements, chosen: np.ndarray, least: float
) -> tuple[dict[str, Comparison], dict[str, np.ndarray]]:
    """The recommended models against local and global ones; differences below `least` count as none."""
    over, same = {}, {}
    for other in ALTERNATIVES:
        parts = {model: compare_models(improvements, model, other) for model in MODEL_KINDS}
        pick = {model: torch.from_numpy(chosen == model) for model in MODEL_KINDS}
        columns = [
            sum(pick[model] * getattr(parts[model], name) for model in MODEL_KINDS) for name in Comparison._fields
        ]
        mixed = Comparison(*columns)
        alike = pick[other] | ((mixed.mean.abs() <= least) & (mixed.sd <= least))
        half = torch.full_like(mixed.mean, 0.5)
        over[other] = mixed._replace(
            mean=torch.where(alike, 0.0, mixed.mean),
            sd=torch.where(alike, 0.0, mixed.sd),
            probability=torch.where(alike, half, mixed.probability),
        )
        same[other] = alike.numpy()
    return over, same


def expected_losses(held: LossSums, improvements: Improvements) -> dict[str, np.ndarray]:
    """By model [m]: the personal model's held-out loss, shrunk on the log scale by how little a client's rows show of
    it, and the others' by their expected differences from it."""
    n, loss = held.rows, held.loss[:, 2]
    total = n.sum().clamp(min=1)
    overall = (loss.sum() / total).clamp(min=torch.finfo(loss.dtype).tiny)
    seen = (n > 0) & (loss > 0)
    own = torch.where(seen, loss / n.clamp(min=1), overall)
    chance = ((held.loss_square.sum() / total / overall**2 - 1).clamp(min=0) / n.clamp(min=1))[seen]
    logs = (own / overall).log()
    between = (logs[seen].square().mean() - chance.mean()).clamp(min=0) if bool(seen.any()) else torch.zeros(())
    weight = torch.zeros_like(own)
    weight[seen] = between / (between + chance).clamp(min=torch.finfo(loss.dtype).tiny)
    personal = overall * (weight * logs).exp()
    others = {
        o: torch.maximum(personal + improvements.mean[:, k], MIN_LOSS_SHARE * personal)
        for k, o in enumerate(ALTERNATIVES)
    }
    return {name: part.numpy() for name, part in (others | {PERSONAL: personal}).items()}


def describe_probability(probability: np.ndarray) -> np.ndarray:
    """[m] str: high, moderate or low."""
    return np.select(
        [probability >= HIGH_PROBABILITY, probability >= MODERATE_PROBABILITY], ["high", "moderate"], "low"
    )
