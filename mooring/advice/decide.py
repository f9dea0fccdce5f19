"""What each client should deploy, and how sure that is: two columns, both always filled.

    deploy      personal, common or alone: the one of least expected loss; of equal models the simplest
    will do     the simplest of common, alone and personal whose expected loss is above the least by no more than the
                practical size, a share of the client's loss
    chance      that the deployed model has a lower loss than alone, and than common: sure (>= .95), likely (>= .8) or
                open; the same where they are one model

A gain is the other model's expected loss less the deployed one's, in the unit of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice.calibrate import calls, chances, interval
from mooring.advice.gain import Gain, gain_of

PERSONAL, COMMON, ALONE = "personal", "common", "alone"
SURE, LIKELY = 0.95, 0.8
SAME = 1e-9  # share of the loss below which two models' losses are the same
PRACTICAL, LEVEL = 0.01, 0.95


class Side(NamedTuple):
    """The deployed models against one other, each [m]."""

    gain: np.ndarray
    low: np.ndarray
    high: np.ndarray
    chance: np.ndarray
    sure: np.ndarray  # str: sure, likely, open or same
    better: np.ndarray  # bool: called better, at a mean chance of error of `calibrate.RATE`
    worse: np.ndarray


class Decision(NamedTuple):
    deploy: np.ndarray  # [m] str
    will_do: np.ndarray  # [m] str
    over_alone: Side
    over_common: Side
    loss: np.ndarray  # [m], what gains are per cent of


def decide(
    over_alone: Gain, over_common: Gain, common_over_alone: Gain, loss: Tensor, practical: float, level: float
) -> Decision:
    """Everyone's answer from trusted gains of personal over alone, personal over common and common over alone.

    `loss` [m] is each client's expected loss; `practical` a share of it.
    """
    least = SAME * loss.abs()
    same = {ALONE: no_difference(over_alone, least), COMMON: no_difference(over_common, least)}
    excess = torch.stack(  # of common, alone, personal over personal; equal models count as equal
        [
            torch.where(same[COMMON], 0.0, over_common.expected),
            torch.where(same[ALONE], 0.0, over_alone.expected),
            torch.zeros_like(loss),
        ]
    )
    names = np.array([COMMON, ALONE, PERSONAL])
    deploy = names[excess.argmin(0).numpy()]  # the first of equals is the simplest
    above = excess - excess.min(0).values <= practical * loss.abs()
    will_do = names[above.to(torch.int8).argmax(0).numpy()]
    alone = side_of(deploy, {PERSONAL: over_alone, COMMON: common_over_alone}, ALONE, same[ALONE], least, level)
    common = side_of(deploy, {PERSONAL: over_common, ALONE: common_over_alone}, COMMON, same[COMMON], least, level)
    return Decision(deploy, will_do, alone, common, loss.numpy())


def no_difference(gain: Gain, least: Tensor) -> Tensor:
    """[m] bool: whether the two models are one."""
    return (gain.mean.abs().max(0).values <= least) & (gain.variance.max(0).values.sqrt() <= least)


def side_of(deploy: np.ndarray, gains: dict[str, Gain], other: str, same: Tensor, least: Tensor, level: float) -> Side:
    """The deployed models against `other`, which some of them are."""
    m = len(deploy)
    gain, low, high = np.zeros(m), np.zeros(m), np.zeros(m)
    chance, alike = np.full(m, 0.5), deploy == other
    for name, found in gains.items():
        here = deploy == name
        # "common over alone" speaks for those who deploy common, and with its sign turned for those who deploy alone.
        if name == ALONE:
            found = found._replace(mean=-found.mean)
        found, place = gain_of(found, torch.from_numpy(here)), np.flatnonzero(here)
        ends = interval(found, level)
        for out, values in zip((gain, low, high, chance), (found.expected, *ends, chances(found))):
            out[place] = values.numpy()
        alike[place] |= no_difference(found, least[here]).numpy()
    if other in (ALONE, COMMON):
        alike = alike | ((deploy == PERSONAL) & same.numpy())
    for out, value in ((gain, 0.0), (low, 0.0), (high, 0.0), (chance, 0.5)):
        out[alike] = value
    better, worse = calls(torch.from_numpy(np.where(alike, 0.5, chance)))
    word = np.where(chance >= SURE, "sure", np.where(chance >= LIKELY, "likely", "open"))
    return Side(gain, low, high, chance, np.where(alike, "same", word), better & ~alike, worse & ~alike)
