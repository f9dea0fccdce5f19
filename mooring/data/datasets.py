"""Data sets by name: tables that come with the package, and the image and text data of `image_datasets.py`."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from mooring.core.errors import RequestError
from mooring.data.clients import Clients
from mooring.data.tables import is_run_directory, suggest_name


class EmbeddedTable(NamedTuple):
    """A table of the package, and its client and target columns."""

    file: str
    client: str
    target: str
    summary: str


EMBEDDED_TABLES = {
    "flights": EmbeddedTable("flights.csv", "airline", "late", "late flights of 16 airlines from New York in 2013"),
    "penguins": EmbeddedTable("penguins.csv", "colony", "body_mass", "body mass of 333 penguins of five colonies"),
    "heart": EmbeddedTable("heart.csv", "hospital", "disease", "heart disease of 920 patients in four hospitals"),
    "parkinsons": EmbeddedTable(
        "parkinsons.csv", "subject", "total_UPDRS", "Parkinson symptoms of 42 patients, by voice"
    ),
}
IMAGES = "mooring.data.image_datasets"  # its `load_image_dataset` loads data sets that are not tables
SUMMARIES = {
    "digits": "1,797 handwritten digits, 8 x 8",
    "mnist": "70,000 handwritten digits, 28 x 28",
    "mnist_writers": "MNIST's training digits, a client per writer",
    "fashion_mnist": "70,000 pieces of clothing, 28 x 28",
    "emnist_balanced": "handwritten characters, 47 classes",
    "emnist_digits": "handwritten digits, 10 classes",
    "emnist_letters": "handwritten letters, 26 classes",
    "femnist": "handwritten characters, a client per writer (LEAF)",
    "cifar10": "color photographs, 10 classes, 32 x 32",
    "tweets": "sentiment of tweets on airlines, a client per user",
    "sent140": "sentiment of tweets, a client per user (LEAF)",
    "shakespeare": "the next character, a client per role",
}
LOADERS = dict.fromkeys(SUMMARIES, IMAGES)  # name -> module, imported when it is needed
WITH_DEPENDENCIES = ("digits",)  # part of scikit-learn


def known_datasets() -> list[str]:
    return [*EMBEDDED_TABLES, *LOADERS]


def describe(name: str) -> dict[str, str]:
    """Return the name, the summary, and the files that the user must have."""
    require_known_dataset(name)
    summary = EMBEDDED_TABLES[name].summary if name in EMBEDDED_TABLES else SUMMARIES[name]
    free = name in EMBEDDED_TABLES or name in WITH_DEPENDENCIES
    return {"name": name, "summary": summary, "needs": "nothing" if free else "its files in --data-dir"}


def is_dataset_name(source: object) -> bool:
    """Return whether a source is the name of a data set and not a path; existing data have priority, a run directory
    has not."""
    if not isinstance(source, str) or source not in known_datasets():
        return False
    return not Path(source).exists() or is_run_directory(Path(source))


def require_known_dataset(name: str) -> None:
    if name not in known_datasets():
        raise RequestError(
            f"there is no file or data set '{name}'; see `mooring list datasets`.{suggest_name(name, known_datasets())}"
        )


def table_path(name: str) -> Path:
    return Path(str(files("mooring.data").joinpath("embedded", EMBEDDED_TABLES[name].file)))


def load_dataset(name: str, data_dir: str | Path | None = None, **options: object) -> Clients:
    """Load the data set `name`, which is not a table; `options` are those of `load_image_dataset`."""
    require_known_dataset(name)
    if name in EMBEDDED_TABLES:
        raise RequestError(f"data set '{name}' is a table; load it like a file.")
    return import_module(LOADERS[name]).load_image_dataset(name, data_dir=data_dir, **options)
