"""What theory states about a federation: constants, heterogeneity, thresholds, lambda by every rule, promises, doubts.

Everything comes from what clients could send: a fit, its covariance, a few sums. Where an assumption of a theorem does
not hold, its entry states that instead of a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import client_function
from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.task import HasProx, HasSolve, Task, require
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS, Clients
from mooring.engines.prepare import Job
from mooring.estimates.client_summaries import Estimate, local_fits, omitted_ridge
from mooring.estimates.constants import assumption_warnings, estimate_constants, theorem_convexity
from mooring.estimates.federation_estimates import estimate_federation
from mooring.estimates.heterogeneity import estimate_diameter
from mooring.estimates.lambda_rules import LambdaRule
from mooring.partial_pooling.client_prior import Prior, average_kinds, make_priors
from mooring.tasks.linear import Linear
from mooring.theory import alternative, minimax, upper_bounds
from mooring.theory.federation_gain import break_even_heterogeneity
from mooring.theory.one_stage_rate import corollary_step_sizes, rounds_bound

MAX_THEORY_CLIENTS = 1_000  # clients that the theorems' constants are estimated from
ROUNDS_ACCURACY = 1e-3  # relative accuracy that the predicted rounds are for


class TheoryReport(NamedTuple):
    """All of it, as `mooring theory --json` prints it."""

    constants: dict[str, JsonObject]
    heterogeneity: JsonObject
    thresholds: JsonObject
    lam: dict[str, JsonObject]
    promises: JsonObject
    assumptions: list[str]
    words: list[str]


def theory_as_json(report: TheoryReport) -> JsonObject:
    """The survey as plain data, as `mooring theory --json` prints it and `theory.json` keeps it."""
    return {("lambda" if name == "lam" else name): part for name, part in report._asdict().items()}


def report_theory(task: Task, clients: Clients, weights: str | Mapping[str, float] = "size") -> TheoryReport:
    """The theory of one federation, from its training rows."""
    if not isinstance(task, HasSolve) or not task.smooth_loss:
        raise RequestError(f"task '{task.name}' is not smooth and convex with an exact solver; the theorems need that.")
    estimates = estimate_federation(task, clients.train, clients.weights(weights))
    if estimates is None:
        raise RequestError(f"{clients.title}: {len(clients)} clients with too few rows for {task.dim} parameters.")
    rows, n, p = clients.train.select(estimates.clients), estimates.n, estimates.p
    priors = make_priors([estimates.scalar, *([estimates.diagonal] if estimates.diagonal else [])], len(rows))
    assert estimates.summary is not None
    fits = local_fits(estimates.summary)
    constants = estimate_constants(estimates.summary, losses=largest_row_loss(task, rows))
    rms, most, _ = estimates.radii
    hessian = fits.hessian + omitted_ridge(task) * torch.eye(task.dim, dtype=fits.hessian.dtype)
    mu, smooth = theorem_convexity(hessian, n, p), constants.smooth.value
    trace = float((p[:, None, None] * fits.hessian).sum(0).trace())
    noise, ell_max = constants.noise.value, constants.ell_max.value
    if not isfinite(noise):
        noise = sqrt(float(priors[0].noise.mean()) * trace)
    lines = thresholds(task, rms, mu.value, noise, ell_max, n, priors, trace / task.dim)
    rules = {name: _plain(rule) for name, rule in estimates.rules.items()}
    lam = rules["auto"]["value"]
    promised = predict_bounds(rms.value, mu.value, smooth, ell_max, lam, p, n)
    doubts = [*mu.warnings, *assumption_warnings(mu.value, smooth, n, p, lam, bounded_domain=False)]
    doubts += [w for e in (*constants, rms) for w in e.warnings if w not in doubts and w != "Not asked for."]
    estimated = {k: v for k, v in constants._asdict().items() if v.warnings != ("Not asked for.",)}
    return TheoryReport(
        {name: _as_record(e) for name, e in estimated.items()} | {"mu_used": {"value": mu.value, "method": mu.method}},
        {"R": rms.value, "low": rms.low, "high": rms.high, "method": rms.method, "R_max": _as_record(most)}
        | {"Gamma": _as_record(estimate_diameter(fits)), "by_feature": spread_by_feature(priors, clients)},
        lines,
        rules,
        promised,
        doubts,
        describe_findings(rms, lines, rules, priors),
    )


def find_theory(job: Job) -> TheoryReport | None:
    """The theory report; None where the theorems do not apply."""
    try:
        return report_theory(job.task, subsample_clients(job.clients), job.run.training.weights)
    except RequestError:
        return None


def subsample_clients(clients: Clients) -> Clients:
    """A part of very many clients, evenly taken."""
    if len(clients) <= MAX_THEORY_CLIENTS:
        return clients
    some = torch.linspace(0, len(clients) - 1, MAX_THEORY_CLIENTS).long()
    parts = {part: getattr(clients, part).select(some) for part in PARTS}
    return replace(clients, names=tuple(clients.names[i] for i in some.tolist()), **parts)


@client_function
def largest_row_loss(task: Task, batch: Batch) -> Tensor:
    """[C]: of a record at its client's own fit, with a small ridge so that the fit exists."""
    risk = task.row_risk(require(task, HasProx).prox(torch.zeros(1, task.dim, dtype=task.dtype), 1e-3, batch), batch)
    return torch.where(batch.weight > 0, risk.double(), 0.0).amax(1) / task.risk_per_loss


def thresholds(
    task: Task, rms: Estimate, mu: float, noise: float, ell_max: float, n: Tensor, priors: list[Prior], curvature: float
) -> JsonObject:
    """Where the theorems change their advice, and on which side the estimate lies."""
    typical = float(n.median())
    border = sqrt(alternative.threshold_squared(mu, ell_max, n.numpy()))
    crossing = float(alternative.crossing_radius(mu, noise, typical))
    best = average_kinds(priors)[0].spread
    # Spread and sampling error of a fit are equal at d tau^2 = d sigma^2 / (n h), h the mean curvature.
    shrunk = sqrt(task.dim * float(best.noise.mean()) / (typical * curvature))
    out: JsonObject = {
        "alternative": {"R": border, "source": "alternative, Corollary 3.1", "side": favored_side(rms, border)},
        "crossing": {
            "R": crossing,
            "source": "noise / (mu sqrt(n)) at the median client",
            "side": favored_side(rms, crossing),
        },
        "one_stage": {
            "R": 1 / sqrt(typical),
            "source": "effect, Theorem 1: 1/sqrt(n)",
            "side": favored_side(rms, 1 / sqrt(typical)),
        },
        "bayes": {
            "R": shrunk,
            "source": "heterogeneity equal to the noise of a median client's fit",
            "side": favored_side(rms, shrunk),
        },
    }
    if isinstance(task, Linear):
        even = break_even_heterogeneity(
            int(typical), task.dim, float(best.noise.mean()) ** 0.5, float(best.center.norm()) or 1.0
        )
        out["break_even"] = {"Gamma": even, "source": "kernel, Theorem 16, at the median client"}
    return out


def favored_side(rms: Estimate, border: float) -> str:
    """The model that a threshold favors; "neither" where the interval straddles it."""
    if rms.high <= border:
        return "global"
    return "local" if rms.low >= border else "neither"


def predict_bounds(r: float, mu: float, smooth: float, ell_max: float, lam: float, p: Tensor, n: Tensor) -> JsonObject:
    """Orders of the average excess risk, and rounds and local steps at the proposed lambda."""
    sizes, weight = n.numpy(), p.numpy()
    out: JsonObject = {
        "minimax_aer": minimax.aer_lower(r, mu, smooth, sizes),
        "global_aer": upper_bounds.fedavg_aer(r, mu, smooth, ell_max, weight, sizes),
        "local_aer": upper_bounds.local_aer(mu, smooth, ell_max, weight, sizes),
        "fedprox_aer": upper_bounds.fedprox_aer(r, mu, smooth, ell_max, weight, sizes),
    }
    if isfinite(lam) and lam > 0:
        plan = corollary_step_sizes(mu, smooth, lam)
        out |= {"lam": lam, "rounds": rounds_bound(mu, smooth, lam, ROUNDS_ACCURACY), "local_steps": plan.steps}
    return out


def spread_by_feature(priors: list[Prior], clients: Clients) -> dict[str, float]:
    """The standard deviation of each coefficient over the clients, largest first; only for one score per row."""
    tau = priors[-1].variance.sqrt().tolist()
    names = [*clients.features, "(intercept)"]
    if len(names) != len(tau):
        return {}
    return dict(sorted(zip(names, tau), key=lambda pair: -pair[1]))


def describe_findings(rms: Estimate, lines: JsonObject, rules: JsonObject, priors: list[Prior]) -> list[str]:
    """The estimates in sentences: heterogeneity, what the thresholds favor, lambda."""
    favored = {
        "global": "favors the global model over local models",
        "local": "favors local models over the global model",
        "neither": "favors neither local models nor the global model",
    }
    sentences = [
        f"Heterogeneity is R = {rms.value:.3g} (95% CI: {rms.low:.3g} to {rms.high:.3g}).",
        f"Compared with the noise of a typical client's local fit ({lines['bayes']['R']:.3g}), it "
        f"{favored[lines['bayes']['side']]}.",
        f"The theorem of the alternative, a worst-case bound, {favored[lines['alternative']['side']]} (threshold "
        f"R = {lines['alternative']['R']:.3g}).",
    ]
    lam = rules["one"]["value"]
    if isfinite(lam):
        sentences.append(f"Empirical Bayes proposes lambda = {lam:.3g} for all, larger for clients with few rows.")
    else:
        sentences.append("The estimated variation between clients is zero: empirical Bayes proposes the global model.")
    return [*sentences, *priors[0].spread.warnings]


def _as_record(e: Estimate) -> JsonObject:
    return {"value": e.value, "low": e.low, "high": e.high, "method": e.method}


def _plain(rule: LambdaRule) -> JsonObject:
    """A rule's value; several numbers become their median and range."""
    if not isinstance(rule.lam, Tensor):
        return {"value": float(rule.lam), "source": rule.source}
    flat = rule.lam.flatten()
    middle = {"value": float(flat.median()), "low": float(flat.min()), "high": float(flat.max())}
    return middle | {"source": rule.source, "numbers": flat.numel()}
