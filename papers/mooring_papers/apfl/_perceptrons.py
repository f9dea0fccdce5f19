"""MLPs on MNIST or its small stand-in, for Tables 2 and 3 of `apfl`."""

from typing import Any

from mooring.core.types import JsonObject
from mooring.data.image_datasets import load_image_dataset
from mooring_papers.apfl._images import perceptron
from mooring_papers.apfl._methods import algorithm, has_global_model
from mooring_papers.training_curves import train_and_evaluate


def run_perceptron(
    seed: int, run: str, data: str, clients: int, hidden: list[int], rounds: int, partition: JsonObject, **work: Any
) -> dict[str, list[float]]:
    """Return the last round of a run; every client is tested on rows like its own (P1)."""
    federation = load_image_dataset(data, clients=clients, protocol="P1", seed=seed, **partition)
    task, method = perceptron(federation, tuple(hidden)), algorithm(run, **work)
    return train_and_evaluate(
        method, task, federation, rounds=rounds, every=rounds, seed=seed, common=has_global_model(run), online=True
    )
