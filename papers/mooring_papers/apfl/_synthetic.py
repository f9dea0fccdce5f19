"""Synthetic(gamma, beta) of apfl, Appendix B.1, with softmax regression."""

from mooring.data.clients import Clients
from mooring.tasks.logistic import Logistic
from mooring_papers.generators import SyntheticClasses

DIM, CLASSES, RIDGE = 60, 10, 1e-4
TASK = Logistic(DIM, CLASSES, ridge=RIDGE)


def synthetic(seed: int, spread: float, clients: int, rows: int, sizes: str = "equal") -> Clients:
    """Both parameters are `spread`, read as standard deviations; 80/20 split. `rows` for every client, or, with sizes =
    "lognormal", at most so many."""
    samples = rows if sizes == "equal" else sizes
    return SyntheticClasses(clients, samples, DIM, CLASSES, model_spread=spread, input_spread=spread, most=rows).make(
        seed
    )
