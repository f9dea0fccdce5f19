"""Figure 1 of `kernel`: FedAvg with s > 1 and FedProx miss the stationary point and still estimate well."""

from mooring_papers.base.claims import NEARLY, Claim, close, every, higher, lower, ratio
from mooring_papers.base.experiment import Cell, Experiment, Panel, Table, grid
from mooring_papers.base.results import of
from mooring_papers.kernel import _stationary as setup
from mooring_papers.kernel._stationary import (
    FULL,
    LABELS,
    LEVELLING,
    METHODS,
    error,
    gradient,
    package_error,
    package_gradient,
    rounds_to,
)

POINTS = grid(batch=[FULL])


EXPERIMENT = Experiment(
    title="Gradient norm and estimation error of FedAvg and FedProx on linear regression",
    trial=setup.trial,
    presets=setup.presets(POINTS),
    claims=[
        Claim(
            "s1-is-stationary",
            "the gradient at the limit of FedAvg with s = 1 is 0 up to rounding (1e-12)",
            lower("limit s = 1", 1e-12),
        ),
        Claim(
            "others-are-not",
            "after 200 rounds of KernelFedAvg and KernelFedProx the gradients of s = 5, s = 10 and FedProx are above "
            "that of s = 1",
            every(**{m: higher(package_gradient(m), package_gradient("s = 1")) for m in LEVELLING}),
        ),
        Claim(
            "same-error",
            "after 200 rounds of KernelFedAvg and KernelFedProx the estimation errors of s = 5, s = 10 and FedProx are "
            "within 10 % of that of s = 1",
            every(**{m: close(package_error(m), package_error("s = 1"), NEARLY) for m in LEVELLING}),
        ),
        Claim(
            "rounds-proportional-to-s",
            "the rounds of s = 1 until 1.05 times the limit's error are within 10 % of 5 times those of s = 5 and of "
            "10 times those of s = 10",
            every(
                **{
                    f"s = {s}": ratio(rounds_to("s = 1"), rounds_to(f"s = {s}"), s / (1 + NEARLY), s * (1 + NEARLY))
                    for s in (5, 10)
                }
            ),
        ),
    ],
    panels=[
        Panel(
            "t", {LABELS[m]: gradient(m) for m in METHODS}, "rounds t", r"$\|\nabla \ell(\theta_t)\|_2$", "(a)", log="y"
        ),
        Panel("t", {LABELS[m]: error(m) for m in METHODS}, "rounds t", r"$\|\theta_t - \theta^*\|_2$", "(b)", log="y"),
    ],
    tables=[
        Table(
            "At the limit",
            (
                "gradient norm",
                "estimation error",
                "estimation error of the package's algorithm",
                "rounds to 1.05 times the limit's error",
            ),
            {
                LABELS[m]: (Cell(f"limit {m}"), Cell(of(error(m), at=-1)), Cell(package_error(m)), Cell(rounds_to(m)))
                for m in METHODS
            },
        )
    ],
    reads="The number of rounds is not printed: 200. Clients train on half of the displayed loss, 1/(2 n_i) per "
    "client, as in Section 4; curves are the operator's, and the package's KernelFedAvg and KernelFedProx are judged "
    "after the last round; the gradient shown is that of the displayed loss.",
)
