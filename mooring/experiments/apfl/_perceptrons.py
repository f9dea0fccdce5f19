"""MLPs on MNIST or its small stand-in, for Tables 2 and 3 of `apfl`."""

from typing import Any

from mooring.data.images import named_images
from mooring.experiments.apfl._images import perceptron
from mooring.experiments.apfl._methods import algorithm, has_common
from mooring.experiments.federated import follow


def perceptron_run(
    seed: int, run: str, data: str, clients: int, hidden: list[int], rounds: int, deal: dict[str, Any], **work: Any
) -> dict[str, list[float]]:
    """The last round of a run on rows dealt out as `deal` says, every client tested on rows like its own (P1)."""
    federation = named_images(data, clients=clients, protocol="P1", seed=seed, **deal)
    task, method = perceptron(federation, tuple(hidden)), algorithm(run, **work)
    return follow(method, task, federation, rounds=rounds, every=rounds, seed=seed, common=has_common(run), online=True)
