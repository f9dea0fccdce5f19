"""Figure 4 of `kernel`: federation gains fall as the clients' truths move apart; a client with few rows gains more."""

import numpy as np

from mooring.theory.federation_gain import break_even_heterogeneity
from mooring_papers.base.claims import NEARLY, Claim, alike, crosses, every, falling, higher
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table
from mooring_papers.base.results import Results
from mooring_papers.generators import model_heterogeneity
from mooring_papers.kernel._gains import METHODS, PROBES, flows, gain, gains

ETA, DIM, NOISE = 0.1, 100, 0.5
GAPS = np.geomspace(0.05, 20, 25).tolist()
SCARCE, RICH = break_even_heterogeneity(50, DIM, NOISE, DIM**0.5), break_even_heterogeneity(500, DIM, NOISE, DIM**0.5)
PLACED = {
    "one client apart from the rest (shown)": "probe_vs_rest",
    "the client itself moved": "probe_moved",
    "two halves": "two_cluster",
    "Gaussian, rescaled": "gaussian",
}


def trial(seed: int, gaps: list) -> dict:
    """Gains along the gaps. Responses and truths are affine in the gap, so two data sets give them all."""
    out: dict = {"gap": list(gaps)}
    flow = flows(model_heterogeneity(0.0).make(seed), ETA)  # inputs depend neither on the gap nor on the truths
    for mode in PLACED.values():
        for client, probe in PROBES.items():
            near, far = (model_heterogeneity(gap, mode, probe).make(seed) for gap in (0.0, 1.0))
            y, truth = (
                a.numpy()[:, None] + (b - a).numpy()[:, None] * np.array(gaps)
                for a, b in ((near.train.y, far.train.y), (near.truth.w[probe], far.truth.w[probe]))
            )
            client_gains = gains(near, flow, client, y, truth)
            out |= {series(client, method, mode): client_gains[gain(client, method)].tolist() for method in METHODS}
    return out


def series(client: str, method: str, mode: str = "probe_vs_rest") -> str:
    return f"{gain(client, method)} {mode}"


def crossing(client: str, mode: str):
    """Where the gain of s = 1 falls below 1, for the table."""

    def measure(results: Results) -> float:
        return crosses(series(client, "s = 1", mode), 1.0, "gap", 0, np.inf)(results).numbers["crossing"]

    return measure


EXPERIMENT = Experiment(
    title="Federation gain against the distance between the clients' true models",
    trial=trial,
    presets={
        "smoke": Preset(repeats=2, settings={"gaps": GAPS[::3]}),
        "quick": Preset(repeats=10, settings={"gaps": GAPS}),
        "paper": Preset(repeats=20, settings={"gaps": GAPS}),
    },
    claims=[
        Claim(
            "methods-indistinguishable",
            "at every distance the gains of FedAvg with s = 1, 5, 10 and of FedProx are within 10 % of each other, for "
            "both clients",
            every(**{client: alike([series(client, m) for m in METHODS], NEARLY) for client in PROBES}),
        ),
        Claim(
            "gain-falls-with-distance",
            "the gain falls from each of the 25 distances to the next, for both clients and all methods",
            every(**{f"{client} {m}": falling(series(client, m), "gap") for client in PROBES for m in METHODS}),
        ),
        Claim(
            "scarce-gains-more",
            "at every distance the gain of the client with few rows is above that of the client with many",
            every(**{m: higher(series("scarce", m), series("rich", m)) for m in METHODS}),
        ),
        *(
            Claim(
                f"{client}-crosses-at-{printed}",
                f"the gain of the client with {rows} rows falls below 1 at a distance within 10 % of {printed}, for "
                "all methods",
                every(
                    **{
                        m: crosses(series(client, m), 1.0, "gap", printed / (1 + NEARLY), printed * (1 + NEARLY))
                        for m in METHODS
                    }
                ),
            )
            for client, rows, printed in (("scarce", 50, 7.5), ("rich", 500, 0.3))
        ),
    ],
    panels=[
        Panel(
            "gap",
            {f"{m if m == 'FedProx' else 'FedAvg, ' + m}": series(client, m) for m in METHODS},
            r"$\Gamma$",
            "federation gain (ratio of norms)",
            f"({name}) a client with {rows} rows",
            log="xy",
            across={"gain 1": 1.0},
            upright={f"predicted {border:.2g}": border},
        )
        for name, client, rows, border in (("a", "scarce", 50, SCARCE), ("b", "rich", 500, RICH))
    ],
    tables=[
        Table(
            "Distance at which joining stops paying, FedAvg with s = 1, by how the truths are placed",
            ("few rows", "many rows"),
            {
                placed: [Cell(crossing("scarce", mode), printed[0]), Cell(crossing("rich", mode), printed[1])]
                for (placed, mode), printed in zip(PLACED.items(), ((7.5, 0.3), *[(None, None)] * 3))
            },
        )
    ],
    reads="How the truths follow from their largest distance is not printed. Here the evaluated client keeps its truth "
    "and all others share one at that distance, which keeps |theta*|, on which the prediction rests. The gain shown is "
    "the ratio of norms; Definition 15 has its square, which crosses 1 at the same place.",
)
