"""Items of a federation that are no plain rows: several inputs, dictionaries, data sets that are read item by item.

Rows hold the number of each item; a network fetches the items of a minibatch by their numbers. Data sets are read anew
in every epoch, so that augmentation is drawn again and images on disk are never all in memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from mooring.core.cohort import StateTree
from mooring.core.errors import RequestError

Collate = Callable[[list[Any]], Any]
Inputs = Any  # a tensor, or a dictionary, tuple or list of tensors [N, ...]
TARGET_KEYS = ("labels", "label", "targets", "target", "y")  # of items that are dictionaries


class SizedItems(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class TensorItems:
    """Inputs in memory: a tensor, or a dictionary, tuple or list of tensors [N, ...]."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs

    def take(self, numbers: Tensor) -> Inputs:
        """The inputs of these items [B], in the same structure."""
        return map_tensors(self.inputs, lambda part: part[numbers.cpu()])


class DatasetItems:
    """Map-style data sets, one after another; item i of the k-th has the number starts[k] + i."""

    def __init__(self, datasets: Sequence[SizedItems], collates: Sequence[Collate | None] = ()):
        self.datasets = list(datasets)
        self.collates = [collate or default_collate for collate in (collates or [None] * len(datasets))]
        self.starts = np.cumsum([0, *(len(dataset) for dataset in datasets)])

    def take(self, numbers: Tensor) -> Inputs:
        """The inputs of these items [B], read from their data sets and collated; numpy's and Python's random numbers
        follow torch's seed, as in the workers of a DataLoader."""
        states, seed = (np.random.get_state(), random.getstate()), torch.initial_seed()
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            items, k = [], 0
            for number in numbers.tolist():
                k = int(np.searchsorted(self.starts, number, side="right")) - 1
                items.append(self._read(k, number - int(self.starts[k])))
            return split_item(self.collates[k](items))[0]
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])

    def _read(self, k: int, i: int) -> object:
        try:
            return self.datasets[k][i]
        except Exception as error:  # a data set is user code
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RequestError(f"item {i + 1} of data set {k + 1} cannot be read: {why}.") from error


def find_items(x: Any) -> tuple[TensorItems | DatasetItems, int] | None:
    """The items of a tuple or dictionary of arrays [N, ...] or of a data set or loader, and their number; None
    for one array."""
    if isinstance(x, Mapping) or (isinstance(x, tuple) and all(hasattr(part, "__array__") for part in x)):
        tensors = [torch.as_tensor(part) for part in (x.values() if isinstance(x, Mapping) else x)]
        inputs = dict(zip(x, tensors)) if isinstance(x, Mapping) else tuple(tensors)
        return TensorItems(inputs), min((len(part) for part in tensors), default=0)
    if isinstance(x, DataLoader):
        return DatasetItems([x.dataset], [x.collate_fn]), len(x.dataset)  # type: ignore[arg-type,list-item]
    return (DatasetItems([x]), len(x)) if is_sized_dataset(x) else None


def is_sized_dataset(x: object) -> bool:
    """Whether an object has a length and items as a map-style data set has, also one that is not torch's."""
    is_other = isinstance(x, list | tuple | str | Mapping) or hasattr(x, "__array__")
    return not is_other and hasattr(x, "__getitem__") and hasattr(x, "__len__")


def split_item(item: Inputs) -> tuple[Inputs, Inputs]:
    """(inputs, target) of an item or a batch: the last of a tuple, or the entry of a dictionary that is called so."""
    if isinstance(item, Mapping):
        key = next((key for key in TARGET_KEYS if key in item), None)
        if key is None:
            raise ValueError(f"a dictionary needs a target, under one of {', '.join(TARGET_KEYS)}")
        return {name: value for name, value in item.items() if name != key}, item[key]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise ValueError("an item is (input, target), (input, input, ..., target) or a dictionary with a target")
    return (item[0] if len(item) == 2 else tuple(item[:-1])), item[-1]


def map_tensors(tree: StateTree, change: Callable[[Tensor], object]) -> Inputs:
    """The same structure of dictionaries, tuples and lists with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tensors(part, change) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(part, change) for part in tree)
    return tree
