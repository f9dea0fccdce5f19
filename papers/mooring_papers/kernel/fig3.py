"""Figure 3 of `kernel`: minibatches have almost no effect on the estimation error."""

from mooring_papers.base.claims import NEARLY, Claim, alike, close, every, higher, lower
from mooring_papers.base.experiment import Cell, Experiment, Panel, Table
from mooring_papers.base.results import of
from mooring_papers.kernel import _stationary as setup
from mooring_papers.kernel._stationary import FULL, LABELS, METHODS, error, package_error, rounds_to
from mooring_papers.kernel.fig2 import BATCHES, MINI, POINTS


def last(method: str, **batch):
    """After the last round of the package's KernelFedAvg or KernelFedProx."""
    return of(package_error(method), **batch)


EXPERIMENT = Experiment(
    title="Minibatches and the estimation error",
    trial=setup.trial,
    presets=setup.presets(POINTS),
    claims=[
        Claim(
            "same-error-in-each-panel",
            "with all rows and with batches of 20, 50 and 100 the estimation errors of KernelFedAvg (s = 1, 5, 10) and "
            "KernelFedProx after 200 rounds are within 10 % of each other",
            alike([last(m) for m in METHODS], NEARLY),
        ),
        Claim(
            "batches-do-not-matter",
            "for KernelFedAvg with every s and KernelFedProx the estimation error after 200 rounds with batches is "
            "within 10 % of that with all rows",
            every(**{m: close(last(m, batch=MINI), last(m, batch=FULL), NEARLY) for m in METHODS}),
        ),
        Claim(
            "s1-slightly-slower",
            "with batches s = 1 takes more rounds until 1.05 times the limit's error than with all rows, by at most "
            "10 %",
            every(
                more=higher(of(rounds_to("s = 1"), batch=MINI), of(rounds_to("s = 1"), batch=FULL)),
                most=lower(of(rounds_to("s = 1"), batch=MINI), of(rounds_to("s = 1"), batch=FULL), 1 + NEARLY),
            ),
        ),
    ],
    panels=[
        Panel(
            "t",
            {LABELS[m]: of(error(m), batch=batch) for m in METHODS},
            "rounds t",
            r"$\|\theta_t - \theta^*\|_2$",
            f"({name}) " + (f"B = {batch}" if batch else "full batch"),
            log="y",
        )
        for name, batch in zip("abcd", (FULL, *BATCHES))
    ],
    tables=[
        Table(
            "Rounds to 1.05 times the limit's error",
            ("full batch", *(f"B = {b}" for b in BATCHES)),
            {LABELS[m]: [Cell(of(rounds_to(m), batch=b)) for b in (FULL, *BATCHES)] for m in METHODS},
        ),
    ],
    reads="Batches as in Figure 2.",
)
