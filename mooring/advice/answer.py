"""From evidence to an answer: trusted gains, what everyone should deploy, and the federation's line.

Predicted gains are trusted as far as held-out rows bear them out; of networks and newcomers, whose gains nothing
predicts, held-out rows are all there is. Rows that a table keeps apart for tests are one more witness in both cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.calibrate import Trust, Witness, federation_line, trust, trusted, with_witness
from mooring.advice.crossfit import Evidence, held_rows
from mooring.advice.decide import LEVEL, PRACTICAL, Decision, decide
from mooring.advice.gain import Gain
from mooring.advice.heldout import held_out_gain, together
from mooring.advice.tally import PAIRS

STEADY = 10.0  # rows' worth of everybody's loss that a client's own is steadied by
LEAST = 0.1  # of a client's loss: no other model is taken to lose less
Line = tuple[float, float, float]  # mean, low, high


class Answer(NamedTuple):
    decision: Decision
    lines: dict[str, Line]  # by pair: the mean gain over all rows
    loss: dict[str, float]  # mean held-out loss of alone, common and personal, over rows
    base: dict[str, np.ndarray]  # [m], each client's expected loss with alone and with common: what gains are shares of
    trust: dict[str, Trust]
    gains: dict[str, Gain]  # trusted, in the unit of the loss


def answer(
    evidence: Evidence,
    size: Tensor,
    *,
    unit: float = 1.0,
    practical: float = PRACTICAL,
    level: float = LEVEL,
    tests: Mapping[str, Witness] | None = None,
) -> Answer:
    """Everyone's answer. `size` [m] are the clients' rows, `unit` turns losses into the target's own.

    `tests` has, by pair, what test rows say, in the unit of the task.
    """
    m, share = len(size), size.double() / size.sum()
    known: dict[str, Trust] = {}
    gains: dict[str, Gain] = {}
    lines: dict[str, Line] = {}
    for name in PAIRS:
        seen = evidence.seen[name]
        if evidence.gain is None:
            seen = seen if tests is None else together(seen, tests[name])
            known[name], found = Trust(1.0, 0.0, 1.0), held_out_gain(seen)
            line = federation_line(seen, None, share, known[name], level)
        else:
            known[name] = trust(seen)
            found = trusted(evidence.gain[name], known[name])
            line = federation_line(seen, evidence.gain[name], share, known[name], level)
            if tests is not None:
                found = with_witness(found, tests[name].observed, tests[name].error)
        gains[name] = scaled(in_numbers(found), unit)
        lines[name] = tuple(unit * value if value == value else 0.0 for value in line)  # type: ignore[assignment]
    rows = held_rows(evidence).double()
    losses = {name: unit * torch.nan_to_num(part) for name, part in evidence.losses.items()}
    overall = {name: float(rows @ part / rows.sum()) for name, part in losses.items()}
    own = torch.full((m,), overall["personal"], dtype=torch.float64)
    own[evidence.asked] = (rows * losses["personal"] + STEADY * overall["personal"]) / (rows + STEADY)
    decision = decide(*(gains[name] for name in PAIRS), own, practical, level)  # type: ignore[call-arg,arg-type]
    base = {
        other: torch.maximum(own + gains[f"personal over {other}"].expected, LEAST * own).numpy()
        for other in ("alone", "common")
    }
    return Answer(decision, lines, overall, base, known, gains)


def in_numbers(gain: Gain) -> Gain:
    """Gains that ran out of numbers (targets without any noise, which every model fits) are none."""
    lost = ~(gain.mean.isfinite() & gain.variance.isfinite() & gain.weight.isfinite()).all(0)
    if not bool(lost.any()):
        return gain
    even = torch.full_like(gain.weight, 1 / len(gain.weight))
    parts = {"mean": 0.0, "variance": 0.0}
    return gain._replace(
        weight=torch.where(lost, even, gain.weight),
        **{name: torch.where(lost, value, getattr(gain, name)) for name, value in parts.items()},
        noise=torch.nan_to_num(gain.noise),
        doubt=torch.nan_to_num(gain.doubt),
    )


def scaled(gain: Gain, unit: float) -> Gain:
    return gain._replace(
        mean=unit * gain.mean,
        variance=unit**2 * gain.variance,
        noise=unit**2 * gain.noise,
        shared=unit**2 * gain.shared,
    )
