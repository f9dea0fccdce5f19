"""Synthetic(gamma, beta) of apfl, Appendix B.1, with softmax regression."""

from mooring.data.clients import Clients
from mooring.data.generators import SyntheticClasses
from mooring.tasks.logistic import Logistic

DIM, CLASSES, RIDGE = 60, 10, 1e-4
TASK = Logistic(DIM, CLASSES, ridge=RIDGE)


def synthetic(seed: int, spread: float, clients: int, most: int) -> Clients:
    """Both parameters are `spread`, read as standard deviations; sizes are lognormal, at most `most`; 80/20 split."""
    return SyntheticClasses(
        clients, "lognormal", DIM, CLASSES, model_spread=spread, input_spread=spread, most=most
    ).make(seed)
