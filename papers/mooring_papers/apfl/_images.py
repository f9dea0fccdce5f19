"""MNIST or its small stand-in, partitioned by classes as in `apfl`, each client tested on rows like its own (P1)."""

from typing import Any

from mooring.data.clients import Clients
from mooring.data.image_datasets import load_image_dataset
from mooring.tasks.network import NetworkTask
from mooring_papers.apfl._methods import algorithm, has_global_model
from mooring_papers.networks import mlp, softmax, steps
from mooring_papers.training_curves import train_and_evaluate

CLASSES = 10
RIDGE = 1e-4  # the paper regularizes without printing the strength
DIGITS = "digits of scikit-learn, 8x8, instead of MNIST; P1"
MNIST = "MNIST; P1"


def partition_images(seed: int, data: str, clients: int, classes: int, **load_options: Any) -> Clients:
    """Return `classes` classes per client; with all ten the rows are assigned at random (IID)."""
    partition = "iid" if classes == CLASSES else "classes"
    return load_image_dataset(
        data, partition=partition, clients=clients, classes_per_client=classes, protocol="P1", seed=seed, **load_options
    )


def perceptron(clients: Clients, hidden: tuple[int, ...]) -> NetworkTask:
    features = clients.train.x.shape[1]
    return NetworkTask(mlp(features, *hidden, CLASSES), kernels=steps(features))


def run_softmax(
    seed: int, run: str, classes: int, data: str, clients: int, rounds: int, every: int, participation: float = 1.0
) -> dict[str, list[float]]:
    """Train regularized softmax regression: tau = 10 local steps per round."""
    federation = partition_images(seed, data, clients, classes)
    return train_and_evaluate(
        algorithm(run),
        softmax(federation.train.x.shape[1], CLASSES, ridge=RIDGE),
        federation,
        rounds=rounds,
        every=every,
        seed=seed,
        participation=participation,
        common=has_global_model(run),
        online=True,
    )
