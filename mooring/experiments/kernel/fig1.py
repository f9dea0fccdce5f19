"""Figure 1 of `kernel`: FedAvg with s > 1 and FedProx miss the stationary point and still estimate well."""

from mooring.experiments.base.claims import Claim, alike, every, flat, higher, lower, ratio
from mooring.experiments.base.experiment import Cell, Experiment, Panel, Table, grid
from mooring.experiments.base.results import of
from mooring.experiments.kernel import _stationary as setup
from mooring.experiments.kernel._stationary import FULL, LABELS, LEVELLING, METHODS, error, final, gradient, rounds_to

POINTS = grid(batch=[FULL])


EXPERIMENT = Experiment(
    title="Gradient norm and estimation error of FedAvg and FedProx on linear regression",
    trial=setup.trial,
    presets=setup.presets(POINTS),
    claims=[
        Claim(
            "s1-is-stationary",
            "FedAvg with s = 1 drives the gradient to 0: 200 rounds leave less than a millionth, the limit is 1e-12 "
            "or less",
            every(share=lower(final("s = 1"), of(gradient("s = 1"), at=0), 1e-6), limit=lower("limit s = 1", 1e-12)),
        ),
        Claim(
            "others-level-off",
            "with s = 5, s = 10 and FedProx the gradient levels off (by 2 % over the last 50 rounds), "
            "at over 1,000 times that of s = 1",
            every(
                **{f"{m} level": flat(gradient(m), "t", 0.02, span=(150, 200)) for m in LEVELLING},
                **{f"{m} height": higher(final(m), final("s = 1"), 1000) for m in LEVELLING},
            ),
        ),
        Claim(
            "same-error",
            "all four reach almost the same estimation error (within 5 %)",
            alike([of(error(method), at=-1) for method in METHODS], 0.05),
        ),
        Claim(
            "s-fold-fewer-rounds",
            "with s = 5 and s = 10 the rounds to converge shrink roughly by the factor s (30 % off at most)",
            every(
                **{
                    "s = 5": ratio(rounds_to("s = 1"), rounds_to("s = 5"), 3.5, 6.5),
                    "s = 10": ratio(rounds_to("s = 1"), rounds_to("s = 10"), 7, 13),
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
            ("gradient norm", "estimation error", "rounds to 1.05 times the limit's error"),
            {LABELS[m]: (Cell(f"limit {m}"), Cell(of(error(m), at=-1)), Cell(rounds_to(m))) for m in METHODS},
        )
    ],
    reads="The number of rounds is not printed: 200. Clients train on half of the displayed loss, 1/(2 n_i) per "
    "client, as in Section 4; the gradient shown is that of the displayed loss.",
)
