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
from mooring.advice.inference.improvements import (
    SUM_QUANTUM,
    Comparison,
    Improvements,
    compare_models,
    improvements_program,
)
from mooring.core.summing import Program, Step, add, run_alone
from mooring.estimates.clustered_mean import (
    CLUSTERED_NUMBERS,
    MeanDifference,
    clustered_sums,
    mean_and_error,
    mean_difference,
    mean_from_sums,
)

DEFAULT_MARGIN = 0.01  # difference too small to matter, as a share of the loss
DEFAULT_LEVEL = 0.95  # of the federation's interval
CLIENT_LEVEL = 0.9  # of a client's: it excludes 0 just where the probability to be better is above HIGH_PROBABILITY
HIGH_PROBABILITY, MODERATE_PROBABILITY = 0.95, 0.8
GUARD_MARGINS = 2.0
MIN_GUARDED_CLIENTS = 3
SHRINKAGE_ROWS = 10.0  # rows' worth of all clients' losses that a client's own are shrunk by
MAX_FREEDOM_SHARE = 0.95  # degrees of freedom as a share of the rows
SAME_LOSS_SHARE = 1e-9  # share of the loss below which two models' losses are the same
MIN_LOSS_SHARE = 0.01  # of a client's expected loss: no other model is expected to have less
POOLED_LOSSES = Step("pooled losses", "mean held-out losses of local, global and personal models", SUM_QUANTUM, False)
GUARD_COUNTS = Step("guard counts", "how many clients would get which model", 1.0, False)
GUARD = Step("guard", "whether a group of clients would lose by its recommendation", SUM_QUANTUM, False, times=3)
LINE = Step("improvement line", "mean differences of losses, with errors clustered by client", SUM_QUANTUM, False)
EXPECTED_LOSSES = Step("expected losses", "how much clients' losses vary", SUM_QUANTUM, False)


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
    """Everyone's recommendation from held-out sums, and from sums over all rows with the models to be used, where all
    clients' sums are at hand.

    `fitted` are sums over the rows that the held-out models were fitted to.
    """
    found = run_alone(recommendation_program(held, own, margin, level))
    if fitted is None:
        return found
    chosen, scaled = found.recommended, held._replace(loss=full_size_factors(held, fitted) * held.loss)
    full = _mean_differences(held.rows, scaled.loss, scaled.loss[:, 2], level)
    of_recommended = _mean_differences(held.rows, scaled.loss, recommended_losses(scaled, chosen), level)
    line, personal = _include(found.line, of_recommended), _include(found.personal_line, full)
    return found._replace(line=line, personal_line=personal, full_line=full)


def recommendation_program(
    held: LossSums, own: LossSums, margin: float = DEFAULT_MARGIN, level: float = DEFAULT_LEVEL
) -> Program[Recommendations]:
    """The recommendations of a cohort's clients, from sums over all clients."""
    improvements = yield from improvements_program(held, own)
    total = yield from add(POOLED_LOSSES, torch.cat([held.rows[:, None], held.loss], 1))
    rows = max(float(total[0]), 1.0)
    pooled = dict(zip(MODEL_KINDS, (total[1:] / rows).tolist()))
    chosen = yield from choose_program(held, own, margin * abs(pooled[PERSONAL]))
    recommended = recommended_losses(held, chosen)
    gaps = [held.loss[:, k] - part for part in (recommended, held.loss[:, 2]) for k in range(2)]
    moments = [clustered_sums(held.rows, gap, held.rows > 0) for gap in gaps]
    total = yield from add(LINE, torch.cat([recommended[:, None], *moments], 1))
    lines = [mean_from_sums(part, level) for part in total[1:].split(CLUSTERED_NUMBERS)]
    line, personal_line = (dict(zip(ALTERNATIVES, pair)) for pair in (lines[:2], lines[2:]))
    over, same = compare_recommended(improvements, chosen, SAME_LOSS_SHARE * abs(pooled[PERSONAL]))
    losses = pooled | {"recommended": float(total[0]) / rows}
    expected = yield from expected_program(held, improvements, pooled[PERSONAL])
    return Recommendations(chosen, expected, over, same, losses, line, personal_line, None)


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
    """[m] str: the recommended kinds of model, where all clients' sums are at hand."""
    return run_alone(choose_program(held, own, margin * abs(pooled_losses(held)[PERSONAL])))


def choose_program(held: LossSums, own: LossSums, limit: float) -> Program[np.ndarray]:
    """[C] str: the recommended kinds of model of a cohort's clients; differences up to `limit` do not matter."""
    closest = torch.maximum(_upper_divergence(own), _upper_divergence(held)).min(1)
    chosen = np.where((closest.values <= limit).numpy(), np.array(ALTERNATIVES)[closest.indices.numpy()], PERSONAL)
    seen = held.rows > 0
    total = yield from add(GUARD_COUNTS, torch.stack([torch.from_numpy(chosen == o) & seen for o in MODEL_KINDS], 1))
    counts = dict(zip(MODEL_KINDS, total.tolist()))
    everybody = sum(counts.values())
    parts = [
        _group_sums(held, torch.from_numpy(chosen == o) & seen, held.difference[:, k], counts[o], everybody)
        for k, o in enumerate(ALTERNATIVES)
    ]
    total = yield from add(GUARD, torch.cat(parts, 1))
    for other, sums in zip(ALTERNATIVES, total.chunk(2)):
        if _is_worse(sums, limit, everybody):
            chosen = np.where(chosen == other, PERSONAL, chosen)
            counts |= {PERSONAL: counts[PERSONAL] + counts[other], other: 0.0}
    for k, other in enumerate(ALTERNATIVES):
        group = torch.from_numpy(chosen != other) & seen
        worse = recommended_losses(held, chosen) - held.loss[:, k]
        part = _group_sums(held, group, worse, everybody - counts[other], everybody)
        total = yield from add(GUARD, torch.cat([part, torch.zeros_like(part)], 1))
        if _is_worse(total.chunk(2)[0], limit, everybody):
            chosen = np.full_like(chosen, other)
            counts = dict.fromkeys(MODEL_KINDS, 0.0) | {other: everybody}
    return chosen


def _group_sums(held: LossSums, group: Tensor, sums: Tensor, size: float, everybody: float) -> Tensor:
    """[C, 7]: the parts of a group's mean and its error. A group of fewer than MIN_GUARDED_CLIENTS has none, since sums
    over it would nearly be single clients' own, unless there is one client in all."""
    roots = held.deviation[:, :2].sqrt().sum(1) + held.divergence_square.sqrt().sum(1)
    alone = torch.where(group, roots, 0.0)
    return torch.cat([clustered_sums(held.rows, sums, group), alone[:, None]], 1) * float(
        size >= MIN_GUARDED_CLIENTS or everybody == 1
    )


def _is_worse(total: Tensor, limit: float, clients: float) -> bool:
    """Whether the mean of a group is above what the guard allows by one standard error.

    Of one client alone (a new one) rows are the units of chance: the error is at most that of both differences from the
    personal model together, by the sums of squares of their two parts.
    """
    mean, error = mean_and_error(total[:CLUSTERED_NUMBERS])
    if clients == 1 and total[0] == 1:
        error = float(total[-1] / total[1])
    return bool(mean - error > GUARD_MARGINS * limit)


def _upper_divergence(sums: LossSums) -> Tensor:
    """[m, 2]: mean divergences of local and global models over a client's rows, and one standard error; 0 without
    rows."""
    n = sums.rows.clamp(min=1)[:, None]
    mean = sums.divergence / n
    variance = (sums.divergence_square / n - mean**2).clamp(min=0)
    return mean + (variance / (n - 1).clamp(min=1)).sqrt()


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


def expected_program(held: LossSums, improvements: Improvements, pooled: float) -> Program[dict[str, np.ndarray]]:
    """By model [C]: the personal model's held-out loss, shrunk on the log scale by how little a client's rows show of
    it, and the others' by their expected differences from it."""
    n, loss = held.rows, held.loss[:, 2]
    overall = max(pooled, torch.finfo(loss.dtype).tiny)
    seen = (n > 0) & (loss > 0)
    own = torch.where(seen, loss / n.clamp(min=1), overall)
    logs = (own / overall).log()
    parts = [
        held.loss_square,
        seen.double(),
        torch.where(seen, logs**2, 0.0),
        torch.where(seen, 1 / n.clamp(min=1), 0.0),
        n,
    ]
    square, count, spread, inverse, total = yield from add(EXPECTED_LOSSES, torch.stack(parts, 1))
    varies = (square / total.clamp(min=1) / overall**2 - 1).clamp(min=0)
    between = ((spread - varies * inverse) / count.clamp(min=1)).clamp(min=0)
    weight = between / (between + varies / n.clamp(min=1)).clamp(min=torch.finfo(loss.dtype).tiny)
    personal = overall * (torch.where(seen, weight, 0.0) * logs).exp()
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
