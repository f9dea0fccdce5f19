"""Figure 2 of `kernel`: minibatches hardly change the gradients that level off, and lift that of s = 1 off 0."""

from mooring_papers.base.claims import NEARLY, Claim, close, every, higher
from mooring_papers.base.experiment import Experiment, Panel, grid
from mooring_papers.base.results import of, one_of
from mooring_papers.kernel import _stationary as setup
from mooring_papers.kernel._stationary import FULL, LABELS, METHODS, gradient

BATCHES = (20, 50, 100)
POINTS = grid(batch=[FULL, *BATCHES])


def last(method: str, batch):
    return of(gradient(method), at=-1, batch=batch)


MINI = one_of(BATCHES)

EXPERIMENT = Experiment(
    title="Minibatches and the reachability of stationary points",
    trial=setup.trial,
    presets=setup.presets(POINTS),
    claims=[
        Claim(
            "s5-s10-unaffected",
            "with s = 5 and s = 10 the final gradient with batches of 20, 50 and 100 rows is within 10 % of that with "
            "all rows",
            every(**{m: close(last(m, MINI), last(m, FULL), NEARLY) for m in ("s = 5", "s = 10")}),
        ),
        Claim(
            "s1-no-longer-stationary",
            "with s = 1 the final gradient with batches is above that with all rows",
            higher(last("s = 1", MINI), last("s = 1", FULL)),
        ),
        Claim(
            "fedprox-coincides-with-s1",
            "with batches the gradient of FedProx is within 10 % of that of s = 1 after the last round",
            close(last("FedProx", MINI), last("s = 1", MINI), NEARLY),
        ),
    ],
    panels=[
        Panel(
            "t",
            {LABELS[m]: of(gradient(m), batch=batch) for m in METHODS},
            "rounds t",
            r"$\|\nabla \ell(\theta_t)\|_2$",
            f"({name}) " + (f"B = {batch}" if batch else "full batch"),
            log="y",
        )
        for name, batch in zip("abcd", (FULL, *BATCHES))
    ],
    reads="Neither the scale of a batch's loss nor the centre of its proximal step is printed. A batch's loss is the "
    "sum over its rows divided by 2 n_i, and each proximal step is centred at the current local model: of the readings "
    "tried, only this one agrees with what the paper says about Figures 2 and 3.",
)
