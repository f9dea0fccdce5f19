"""Figure 5 of `kernel`: gains when every client sees a random r of 100 coordinates; they jump once all are covered."""

from mooring.theory.federation_gain import covering_rank
from mooring_papers.base.claims import NEARLY, Claim, alike, close, every, higher, lower, rising, within
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring_papers.base.results import between, of, one_of
from mooring_papers.generators import covariate_heterogeneity
from mooring_papers.kernel._gains import METHODS, PROBES, flows, gain, gains

CLIENTS, DIM = 20, 100
PLATEAU = 107  # as printed
SOME = [1, 4, 8, 12, 14, 16, 18, 20, 23, 27, 40, 60, 80, 95, 100]


def trial(seed: int, rank: int) -> dict:
    """Return the gains of a client with 50 rows and of one with 500, as a ratio of norms and squared."""
    data = covariate_heterogeneity(rank).make(seed)
    flow = flows(data, 0.1 * rank / DIM)
    y, truth = data.train.y.numpy()[:, None], data.truth.w[0].numpy()[:, None]
    ratios = {name: float(v[0]) for client in PROBES for name, v in gains(data, flow, client, y, truth).items()}
    return ratios | {f"{name} squared": value**2 for name, value in ratios.items()}


COVERED, LATE, FIRST = between(high=27), between(low=60), one_of((8, 16, 23, 60))

EXPERIMENT = Experiment(
    title="Federation gain against the dimension of the clients' subspaces",
    trial=trial,
    presets={
        "smoke": Preset(grid(rank=[8, 16, 23, 27, 60, 80, 100]), repeats=1),
        "quick": Preset(grid(rank=SOME), repeats=10),
        "paper": Preset(grid(rank=range(1, DIM + 1)), repeats=20),
    },
    claims=[
        Claim(
            "methods-identical",
            "at every r the gains of FedAvg with s = 1, 5, 10 and of FedProx are within 10 % of each other, for both "
            "clients",
            every(**{client: alike([gain(client, m) for m in METHODS], NEARLY) for client in PROBES}),
        ),
        Claim(
            "clients-alike-up-to-27",
            "at every r up to 27 the gains of the client with few and of the client with many rows are within 10 % of "
            "each other, for all methods",
            every(
                **{
                    m: close(of(gain("scarce", m), rank=COVERED), of(gain("rich", m), rank=COVERED), NEARLY)
                    for m in METHODS
                }
            ),
        ),
        *(
            Claim(
                f"{client}-jumps-from-16-to-23",
                f"the gain of the client with {what} rows is larger at r = 23 than at r = 16, for all methods",
                every(**{m: higher(of(gain(client, m), rank=23), of(gain(client, m), rank=16)) for m in METHODS}),
            )
            for client, what in (("scarce", "few"), ("rich", "many"))
        ),
        Claim(
            "scarce-increases",
            "the gain of the client with few rows rises from r = 8 to 16, 23 and 60, for all methods",
            every(**{m: rising(of(gain("scarce", m), rank=FIRST), "rank") for m in METHODS}),
        ),
        Claim(
            "scarce-plateau-near-107",
            "at every r of 60 and more the gain of the client with few rows is within 10 % of 107, for all methods",
            every(
                **{
                    m: within(of(gain("scarce", m), rank=LATE), PLATEAU / (1 + NEARLY), PLATEAU * (1 + NEARLY))
                    for m in METHODS
                }
            ),
        ),
        Claim(
            "rich-increases",
            "the gain of the client with many rows rises from r = 8 to 16, 23 and 60, for all methods",
            every(**{m: rising(of(gain("rich", m), rank=FIRST), "rank") for m in METHODS}),
        ),
        Claim(
            "rich-falls-near-100",
            "the gain of the client with many rows is lower at r = 100 than at r = 80, for all methods",
            every(**{m: lower(of(gain("rich", m), rank=100), of(gain("rich", m), rank=80)) for m in METHODS}),
        ),
    ],
    panels=[
        Panel(
            "rank",
            {f"{m if m == 'FedProx' else 'FedAvg, ' + m}": gain(client, m) for m in METHODS},
            "r",
            "federation gain (ratio of norms)",
            f"({name}) a client with {rows} rows",
            upright={f"m r = d log d: r = {covering_rank(CLIENTS, DIM):.0f}": covering_rank(CLIENTS, DIM)},
        )
        for name, client, rows in (("a", "scarce", 50), ("b", "rich", 500))
    ],
    tables=[
        Table(
            "Gains of FedAvg with s = 1 at r = 100",
            ("ratio of norms (plotted)", "squared (Definition 15)"),
            {
                "few rows": [Cell(of("scarce s = 1", rank=100), PLATEAU), Cell(of("scarce s = 1 squared", rank=100))],
                "many rows": [Cell(of("rich s = 1", rank=100)), Cell(of("rich s = 1 squared", rank=100))],
            },
        )
    ],
    reads="Definition 15 has squared norms, but the printed plateau of 107 is that of the ratio of plain norms, which "
    "is plotted; the squared gains are in the table. Gains are means of per-trial ratios.",
)
