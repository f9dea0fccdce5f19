"""Figure 5 of `effect`: the trade-off of Figure 1d with 100 and 1,000 clients, a tenth of them in every round."""

from mooring.engines.loop import TrainingSteps
from mooring_papers.base.claims import Claim, every, ordered
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.base.results import between, of
from mooring_papers.effect import _synthetic as setup
from mooring_papers.effect._rounds import at_round, rounds_to
from mooring_papers.effect._synthetic import FEDPROX, LABELS, LAMS

SPREADS = [0.1, 0.6, 2.0]
EARLY = 5
SAMPLES, SHARE = 100, 0.1


def trial(
    seed: int, clients: int, spread: float, lam: float, rounds: int, samples: int = SAMPLES
) -> TrainingSteps[dict]:
    return setup.total_errors(
        seed, spread, lam, rounds, clients=clients, samples=samples, participation=SHARE, exact=False
    )


def points(sizes):
    return grid(clients=sizes, spread=SPREADS, lam=list(LAMS.values()))


def curves(measure, **fixed):
    return [measure(lam=lam, **fixed) for lam in LAMS.values()]


def final(**fixed):
    return of("total", at=-1, **fixed)


def early(**fixed):
    return at_round("total", EARLY, **fixed)


def arrival(**fixed):
    return of(rounds_to("total", 0.05), **fixed)


def crowd(k: int):
    """The k-th number of clients, whatever the preset: 100 and then 300 or 1,000."""
    return between(high=100) if k == 0 else between(low=101)


EXPERIMENT = Experiment(
    title="Total error of FedProx by rounds with a tenth of the clients in each (synthetic)",
    trial=trial,
    presets={
        "smoke": Preset(
            points([100, 120]), repeats=1, settings={"rounds": 5, "samples": 20}, data="120 instead of 1,000 clients"
        ),
        "quick": Preset(points([100, 300]), repeats=8, settings={"rounds": 100}, data="300 instead of 1,000 clients"),
        "paper": Preset(points([100, 1000]), repeats=10, settings={"rounds": 300}),
    },
    claims=[
        Claim(
            "small-lambda-faster-early",
            "with 100 and 1,000 clients and at every R (0.1, 0.6, 2) the total error after 5 rounds rises from the "
            "small over the medium to the large lambda",
            every(**{f"R = {r}": ordered(curves(early, spread=r)) for r in SPREADS}),
        ),
        Claim(
            "large-lambda-more-rounds",
            "with 100 and 1,000 clients and at every R the rounds until the total error is within 5 % of its way to "
            "its end rise from the small over the medium to the large lambda",
            every(**{f"R = {r}": ordered(curves(arrival, spread=r)) for r in SPREADS}),
        ),
        Claim(
            "small-lambda-wins-as-r-grows",
            "with 100 and 1,000 clients the final total error falls with lambda at R = 0.1 and rises with lambda at R "
            "= 2",
            every(
                few=ordered(curves(final, spread=SPREADS[0])[::-1]),
                many=ordered(curves(final, spread=SPREADS[-1])),
            ),
        ),
    ],
    panels=[
        Panel(
            "t",
            {LABELS[name]: of("total", clients=crowd(k), spread=r, lam=LAMS[name]) for name in FEDPROX},
            "communication rounds",
            "local total error",
            f"{('100', '1,000 (quick: 300)')[k]} clients, R = {r}",
            log="y",
        )
        for k in (0, 1)
        for r in SPREADS
    ],
    reads="The paper says nothing of sizes: n = 100, d = 10. The server averages the sampled clients' messages, the "
    "others keep their models, and who was never asked uses the global one. Inner problems are solved exactly, gamma = "
    "1/L_g.",
)
