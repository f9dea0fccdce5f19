"""`fit_mixed_model`: a linear mixed model of a table, with the quantities that lme4 and MixedLM report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm

from mooring.core.errors import RequestError
from mooring.data.formula_parser import MixedFormula, parse_formula
from mooring.data.table_sources import read_source
from mooring.mixed_models.formula import DesignMatrices, build_matrices, build_row_matrices
from mooring.mixed_models.likelihood import (
    CrossProducts,
    ProfiledFit,
    maximize,
    random_effects,
    sum_products,
    variance_covariance,
)

CONFIDENCE_LEVEL = 0.95  # of intervals
RESIDUAL = "residual"
SINGULAR_FACTOR = 1e-4  # of the residual standard deviation: random effects that vary less do not vary
MIN_PIVOT = 1e-9  # of columns of size 1, below which they are linearly dependent


@dataclass(frozen=True, repr=False)
class MixedModel:
    """A fitted linear mixed model; all numbers are in the units of the table."""

    formula: MixedFormula
    reml: bool
    fixed_effects: pd.DataFrame  # by term: estimate, std_error, z, p_value, ci_low, ci_high
    covariance: pd.DataFrame  # [q, q] of the random effects
    variance_components: pd.DataFrame  # by term, the residual last: variance, sd, std_error of the variance
    residual_sd: float
    icc: float  # share of the unexplained variance that lies between clients
    r2_marginal: float  # share of the variance that the fixed effects explain
    r2_conditional: float  # that fixed and random effects explain
    log_likelihood: float
    num_parameters: int
    rows: int
    dropped_rows: int
    effects: np.ndarray  # [m, q]
    effects_sd: np.ndarray  # [m, q]
    effects_covariance: np.ndarray  # [m, q, q], conditional covariances of the effects
    fixed_covariance: np.ndarray  # [p, p], of the fixed effects' estimates
    clients: list[str]
    design: DesignMatrices
    is_singular: bool = False  # whether a combination of random effects does not vary

    @property
    def aic(self) -> float:
        """-2 log-likelihood + 2 parameters."""
        return -2 * self.log_likelihood + 2 * self.num_parameters

    @property
    def bic(self) -> float:
        """-2 log-likelihood + log(rows) parameters."""
        return -2 * self.log_likelihood + float(np.log(self.rows)) * self.num_parameters

    @property
    def correlations(self) -> pd.DataFrame:
        """Correlations of the random effects; NaN where a variance is 0."""
        sd = np.sqrt(np.diag(self.covariance))
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.covariance / np.outer(sd, sd)

    @property
    def random_effects(self) -> pd.DataFrame:
        """One row per client and term, as `ranef` of lme4: deviation from the fixed effects, and its conditional
        standard deviation."""
        terms = list(self.covariance.columns)
        return pd.DataFrame(
            {
                "client": np.repeat(np.array(self.clients, dtype=object), len(terms)),
                "term": terms * len(self.clients),
                "deviation": self.effects.reshape(-1),
                "conditional_sd": self.effects_sd.reshape(-1),
            }
        )

    @property
    def coefficients(self) -> pd.DataFrame:
        """One row per client and one column per term: fixed effects plus the client's deviation, as `coef` of lme4."""
        fixed = self.fixed_effects["estimate"]
        table = pd.DataFrame([fixed.to_numpy()] * len(self.clients), columns=list(fixed.index), index=self.clients)
        for j, term in enumerate(self.covariance.columns):
            table[term] = table.get(term, 0.0) + self.effects[:, j]
        return table

    @property
    def fitted(self) -> np.ndarray:
        """Each row's fitted value with its client's own effects."""
        beta = self.fixed_effects["estimate"].to_numpy()
        return self.design.x @ beta + (self.design.z * self.effects[self.design.code]).sum(1)

    @property
    def residuals(self) -> np.ndarray:
        """Each row's target minus its fitted value."""
        return self.design.y - self.fitted

    def predict(self, data: object, level: float = 0.9) -> pd.DataFrame:
        """One row per row of `data`: `prediction`, and the interval `low` to `high` of an observation.

        A client of the model is predicted with its own effects, and the interval includes their conditional variance;
        a new client with the fixed effects, and the interval includes the variance between clients. Both include the
        residual variance and, for new clients, the errors of the fixed effects.
        """
        if not 0 < level < 1:
            raise RequestError(f"the level of an interval is a share above 0 and below 1, got {level:g}.")
        frame = data if isinstance(data, pd.DataFrame) else read_source(data).frame
        rows = build_row_matrices(self.formula, self.design, frame)
        place = pd.Index(self.clients).get_indexer(rows.clients)
        is_new = place < 0
        effects = np.where(is_new[:, None], 0.0, self.effects[place])
        center = rows.x @ self.fixed_effects["estimate"].to_numpy() + (rows.z * effects).sum(1)
        spread = np.where(is_new[:, None, None], self.covariance.to_numpy()[None], self.effects_covariance[place])
        variance = self.residual_sd**2 + np.einsum("ni,nij,nj->n", rows.z, spread, rows.z)
        variance += is_new * np.einsum("ni,ij,nj->n", rows.x, self.fixed_covariance, rows.x)
        reach = norm.ppf((1 + level) / 2) * np.sqrt(variance)
        return pd.DataFrame({"prediction": center, "low": center - reach, "high": center + reach, "is_new": is_new})

    def local_effects(self) -> pd.DataFrame:
        """Each client's deviations by least squares on its own rows, without pooling; NaN where they do not determine
        them."""
        outcome = self.design.y - self.design.x @ self.fixed_effects["estimate"].to_numpy()
        estimates = np.full_like(self.effects, np.nan)
        for i in range(len(self.clients)):
            z, part = (values[self.design.code == i] for values in (self.design.z, outcome))
            if len(z) and np.linalg.matrix_rank(z) == z.shape[1]:
                estimates[i] = np.linalg.lstsq(z, part, rcond=None)[0]
        return pd.DataFrame(estimates, index=self.clients, columns=list(self.covariance.columns))

    def summary(self) -> str:
        """The model as text, as people know it from lme4."""
        about = self.formula
        sizes = np.bincount(self.design.code)
        groups = (
            f", {len(self.clients)} clients ('{about.client}', {sizes.min()} to {sizes.max()} rows)"
            if about.client
            else ""
        )
        left_out = f" ({self.dropped_rows} with missing values left out)" if self.dropped_rows else ""
        lines = [
            f"Linear mixed model fitted by {'REML' if self.reml else 'maximum likelihood'}",
            f"Formula: {about.text}",
            f"Rows: {self.rows}{left_out}{groups}",
            f"log-likelihood {self.log_likelihood:.2f}{' (REML)' if self.reml else ''}, "
            f"AIC {self.aic:.1f}, BIC {self.bic:.1f}, {self.num_parameters} parameters",
            "",
            "Fixed effects",
            self.fixed_effects.to_string(float_format=lambda value: f"{value:.4g}"),
            "",
            "Variance components",
            self.variance_components.to_string(float_format=lambda value: f"{value:.4g}"),
        ]
        if len(self.covariance) > 1:
            lines += [
                "",
                "Correlations of the random effects",
                self.correlations.to_string(float_format=lambda v: f"{v:.3f}"),
            ]
        lines += [
            "",
            f"Residual SD {self.residual_sd:.4g}, ICC {self.icc:.3f}, "
            f"R2 marginal {self.r2_marginal:.3f}, conditional {self.r2_conditional:.3f}",
        ]
        if self.is_singular:
            lines.append("boundary (singular) fit: a combination of the random effects has no variance")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()


def fit_mixed_model(formula: str, data: object, *, reml: bool = True) -> MixedModel:
    """Fit a linear mixed model with one grouping column, such as "score ~ lrt + (1 + lrt | school)".

    `data` is a data frame or a table's path. `reml` chooses between REML, as lme4 does by default, and maximum
    likelihood. Without a term in parentheses it is a linear regression.
    """
    parts = parse_formula(formula)
    frame = data if isinstance(data, pd.DataFrame) else read_source(data).frame
    design = build_matrices(parts, frame)
    n, p = design.x.shape
    if n <= p:
        raise RequestError(f"{n} rows do not determine {p} fixed effects.")
    if np.linalg.matrix_rank(design.x) < p:
        raise RequestError("the columns of the fixed effects are linearly dependent; leave one of them out.")
    if parts.random is not None and len(design.clients) < 2:
        raise RequestError(f"column '{parts.client}' names one client only; random effects need two or more.")
    return _describe(parts, design, fit_design(design, reml, parts.correlated), reml)


class OrthogonalFit(NamedTuple):
    """A fit to columns that were made orthogonal: calendar years are nearly a multiple of the intercept, so that a
    search in the columns as they are ends before the maximum."""

    products: CrossProducts
    fit: ProfiledFit
    of_x: np.ndarray  # [p, p]: coefficients of the columns as they are, from those of the orthogonal ones
    of_z: np.ndarray  # [q, q]
    log_likelihood: float  # of the columns as they are


def fit_design(design: DesignMatrices, reml: bool, correlated: bool) -> OrthogonalFit:
    """The best fit to a design."""
    of_x = _orthogonalize(design.x)
    of_z = _orthogonalize(design.z) if correlated else _scale(design.z)  # uncorrelated effects of other columns differ
    products = sum_products(design.x @ of_x, design.z @ of_z, design.y, design.code, len(design.clients))
    fit = maximize(products, reml, correlated)
    criterion = float(fit.criterion) - (2 * float(np.linalg.slogdet(of_x)[1]) if reml else 0.0)
    return OrthogonalFit(products, fit, of_x, of_z, -criterion / 2)


def _scale(columns: np.ndarray) -> np.ndarray:
    """[q, q]: columns times this have a root mean square of 1."""
    return np.diag(1 / np.sqrt(np.maximum((columns**2).mean(0), 1e-300)))


def _orthogonalize(columns: np.ndarray) -> np.ndarray:
    """[q, q]: columns times this are orthogonal and have a root mean square of 1; they are scaled where they are
    linearly dependent."""
    scale = _scale(columns)
    triangle = np.linalg.qr(columns @ scale, mode="r") / np.sqrt(len(columns))
    pivots = np.abs(np.diag(triangle))
    if columns.shape[1] > len(columns) or not (pivots > MIN_PIVOT).all():
        return scale
    return scale @ np.linalg.inv(triangle)


def _describe(formula: MixedFormula, design: DesignMatrices, found: OrthogonalFit, reml: bool) -> MixedModel:
    """A fit in the units of the table."""
    products, fit, of_x, of_z, log_likelihood = found
    n, q = len(design.y), len(of_z)
    sigma2 = float(fit.sigma2)
    beta = of_x @ fit.beta.numpy()
    fixed_covariance = sigma2 * of_x @ torch.linalg.inv(fit.information).numpy() @ of_x.T
    error = np.sqrt(np.diag(fixed_covariance))
    z = beta / error
    reach = norm.ppf((1 + CONFIDENCE_LEVEL) / 2) * error
    fixed = pd.DataFrame(
        {
            "estimate": beta,
            "std_error": error,
            "z": z,
            "p_value": 2 * norm.sf(np.abs(z)),
            "ci_low": beta - reach,
            "ci_high": beta + reach,
        },
        index=design.fixed_names,
    )
    covariance = of_z @ (sigma2 * (fit.factor @ fit.factor.T).numpy()) @ of_z.T
    place = np.tril_indices(q) if formula.correlated else (np.arange(q), np.arange(q))
    moves = np.zeros((q + 1, len(place[0]) + 1))  # of the variances, by the estimates of the orthogonal columns
    twice = np.where(place[0] == place[1], 1.0, 2.0)
    moves[:q, :-1] = twice * of_z[:, place[0]] * of_z[:, place[1]]
    moves[-1, -1] = 1.0
    known = variance_covariance(products, fit, reml, formula.correlated)
    errors = np.sqrt(np.einsum("ij,jk,ik->i", moves, known, moves))
    variances = np.append(np.diag(covariance), sigma2)
    components = pd.DataFrame(
        {"variance": variances, "sd": np.sqrt(variances), "std_error": errors}, index=[*design.random_names, RESIDUAL]
    )
    effects, spread = random_effects(products, fit)
    conditional = of_z @ spread.numpy() @ of_z.T
    fitted = design.x @ beta
    between = float(np.trace(covariance @ (design.z.T @ design.z)) / n) if q else 0.0
    explained = float(fitted.var())
    total = explained + between + sigma2
    return MixedModel(
        formula,
        reml,
        fixed,
        pd.DataFrame(covariance, index=design.random_names, columns=design.random_names),
        components,
        float(np.sqrt(sigma2)),
        between / (between + sigma2),
        explained / total,
        (explained + between) / total,
        log_likelihood,
        len(beta) + len(place[0]) + 1,
        n,
        design.dropped_rows,
        effects.numpy() @ of_z.T,
        np.sqrt(np.diagonal(conditional, axis1=1, axis2=2)),
        conditional,
        fixed_covariance,
        design.clients,
        design,
        is_singular=q > 0 and float(torch.linalg.svdvals(fit.factor).min()) < SINGULAR_FACTOR,
    )
