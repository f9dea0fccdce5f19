"""`compare_models`: the likelihood-ratio test of two nested mixed models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import chi2

from mooring.core.errors import RequestError
from mooring.mixed_models.mixed_model import MixedModel, fit_design


class ModelComparison(NamedTuple):
    """A likelihood-ratio test; `p_value` accounts for variances that cannot be negative."""

    statistic: float  # twice the difference of the log-likelihoods
    degrees_of_freedom: tuple[int, ...]  # of the chi-square distributions that are mixed in equal shares
    p_value: float
    log_likelihoods: tuple[float, float]  # of the smaller and the larger model
    fitted_by: str  # "maximum likelihood" or "REML"


def compare_models(smaller: MixedModel, larger: MixedModel) -> ModelComparison:
    """Test a model against a larger one that contains it, on the same rows.

    Models with different fixed effects are compared by maximum likelihood, whatever they were fitted by; models that
    differ in their random effects only, by what both were fitted by. A variance of 0 lies on the boundary of what is
    possible: where one random effect is added to k others, the statistic is distributed as an equal mixture of
    chi-squares with k and k + 1 degrees of freedom (Stram and Lee 1994), 0 and 1 if it is uncorrelated with them.
    """
    if smaller.rows != larger.rows or not np.array_equal(smaller.design.y, larger.design.y):
        raise RequestError(f"the models must be fitted to the same rows, got {smaller.rows} and {larger.rows}.")
    extra_fixed = _extra_columns(smaller.design.x, larger.design.x, "fixed effects")
    small, large = smaller.design.random_names, larger.design.random_names
    if not set(small) <= set(large):
        raise RequestError(
            "the smaller model has a random effect that the larger one does not have; they are not nested."
        )
    if small and smaller.formula.client != larger.formula.client:
        raise RequestError("the models must have the same grouping column.")
    extra_random = len(large) - len(small)
    added = larger.num_parameters - smaller.num_parameters
    if added <= 0:
        raise RequestError("the larger model has no more parameters than the smaller one; there is nothing to test.")
    if extra_random > 1:
        raise RequestError(
            f"the larger model has {extra_random} more random effects; add them one at a time: the "
            "distribution of the statistic is known for one."
        )
    reml = smaller.reml and larger.reml and extra_fixed == 0
    values = (_log_likelihood(smaller, reml), _log_likelihood(larger, reml))
    statistic = max(2 * (values[1] - values[0]), 0.0)
    degrees = (added - 1, added) if extra_random == 1 else (added,)
    tails = [float(chi2.sf(statistic, df)) if df > 0 else float(statistic <= 0) for df in degrees]
    return ModelComparison(statistic, degrees, float(np.mean(tails)), values, "REML" if reml else "maximum likelihood")


def _extra_columns(small: np.ndarray, large: np.ndarray, what: str) -> int:
    """How many columns a design has more than one that it contains."""
    rank = np.linalg.matrix_rank(np.concatenate([small, large], axis=1))
    if rank > large.shape[1]:
        raise RequestError(f"the {what} of the smaller model are not contained in the larger one; they are not nested.")
    return large.shape[1] - small.shape[1]


def _log_likelihood(model: MixedModel, reml: bool) -> float:
    """A model's log-likelihood by REML or maximum likelihood, fitted anew if it was fitted by the other."""
    if model.reml == reml:
        return model.log_likelihood
    return fit_design(model.design, reml, model.formula.correlated).log_likelihood
