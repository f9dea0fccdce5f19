"""Figure 3 of `kernel`: minibatches have almost no effect on the estimation error."""

from mooring.experiments.base.claims import Claim, alike, close, every, higher, lower
from mooring.experiments.base.experiment import Cell, Experiment, Panel, Table
from mooring.experiments.base.results import of
from mooring.experiments.kernel import _stationary as setup
from mooring.experiments.kernel._stationary import FULL, LABELS, METHODS, error, rounds_to
from mooring.experiments.kernel.fig2 import BATCHES, POINTS, small


def last(method: str, **batch):
    return of(error(method), at=-1, **batch)


EXPERIMENT = Experiment(
    title="Minibatches and the estimation error",
    trial=setup.trial,
    presets=setup.presets(POINTS),
    claims=[
        Claim(
            "same-error-in-each-panel",
            "in each of the four panels the final errors of all methods are almost identical (within 5 %)",
            alike([last(m) for m in METHODS], 0.05),
        ),
        Claim(
            "batches-do-not-matter",
            "minibatches have almost no effect on the final estimation error (below 5 %)",
            every(**{m: close(last(m, batch=small), last(m, batch=FULL), 0.05) for m in METHODS}),
        ),
        Claim(
            "s1-slightly-slower",
            "with minibatches s = 1 converges only a bit more slowly: more rounds, 15 % more at most",
            every(
                more=higher(of(rounds_to("s = 1"), batch=small), of(rounds_to("s = 1"), batch=FULL)),
                most=lower(of(rounds_to("s = 1"), batch=small), of(rounds_to("s = 1"), batch=FULL), 1.15),
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
