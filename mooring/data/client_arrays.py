"""Each client's own arrays for a network, used unchanged: nothing is scaled, dropped or recoded.

A federation is a dict by client name, or a list, of: (x, y) of arrays or tensors, a torch Dataset, a DataLoader, or a
dict of these by part, {"train": ..., "validation": ..., "test": ...}. (X, y, groups) is one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.items import DatasetItems, Inputs, TensorItems, is_sized_dataset, split_item
from mooring.core.seeds import client_key
from mooring.core.types import JsonObject
from mooring.data.clients import BINARY, CLASSES, COUNT, MULTILABEL, PARTS, REGRESSION, Clients, require_finite
from mooring.data.splits import TRAIN, parse_shares, random_split
from mooring.data.tables import count_phrase

IGNORED_CLASS = -100  # of a token or pixel that has no target: torch's ignore_index
MIN_ROWS_TO_SPLIT = 3  # rows that a client needs to train, validate and test
KINDS = (REGRESSION, BINARY, CLASSES, COUNT, MULTILABEL)
ROW_FORMS = "(x, y), a torch Dataset, a DataLoader, or a dict of these by part (train, validation, test)"


class ClientRows(NamedTuple):
    """A client's rows, and the part of each if the user sets it."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n] or [n, k]
    part: np.ndarray | None  # [n]
    has_column: bool = False  # whether y was [n, 1]


def is_client_arrays(source: object) -> bool:
    """Return whether a source is arrays or data sets by client, not a table."""
    if isinstance(source, tuple) and len(source) == 3:
        return not isinstance(source[0], pd.DataFrame)
    if not isinstance(source, Mapping | list) or not source:
        return False
    values = list(source.values()) if isinstance(source, Mapping) else source
    return not any(isinstance(value, pd.DataFrame) for value in values)


def load_client_arrays(
    source: object,
    *,
    target_type: str | None = None,
    split: object = None,
    min_rows: int | None = None,
    drop_small: bool = False,
    seed: int = 0,
    standardise: bool = True,
    loss_type: str | None = None,
    refuse_leaks: bool = False,
    **unused: object,
) -> Clients:
    """Return the clients of a source for which `is_client_arrays` is true.

    `standardise` states whether numbers to predict are stored as (y - mean) / scale; predictions are scaled back.
    `loss_type` is the type of targets that the loss takes, "classes" or "binary", if it is known.
    """
    if target_type is not None and target_type not in KINDS:
        raise RequestError(f"target_type must be one of {', '.join(KINDS)}, got {target_type!r}.")
    for name, value in unused.items():
        if value:
            raise RequestError(f"{name} does not apply: the clients' arrays are no table.")
    if isinstance(split, str):
        raise RequestError("split must be three shares here: the clients' arrays have no columns.")
    items = None
    if not isinstance(source, tuple):
        source, items = number_items(source)
    rows_of_client = by_group(*source) if isinstance(source, tuple) else rows_by_client(source)
    names, notes = list(rows_of_client), []
    ys = [client_rows.y for client_rows in rows_of_client.values()]
    kind, classes, ys = targets(ys, names, target_type, loss_type)
    notes += describe_targets(kind, classes, ys)
    indices, note = drop_small_clients(rows_of_client, min_rows or MIN_ROWS_TO_SPLIT, drop_small)
    notes += [note] if note else []
    names, ys = [names[i] for i in indices], [ys[i] for i in indices]
    xs = [rows_of_client[name].x for name in names]
    parts = parts_of([rows_of_client[name].part for name in names], ys, names, kind, split, seed)
    mean, scale = 0.0, 1.0
    if kind == REGRESSION and ys[0].ndim == 1 and standardise:
        train = torch.cat([y[torch.from_numpy(part == TRAIN)] for y, part in zip(ys, parts)]).double()
        mean, scale = float(train.mean()), float(train.std(unbiased=False)) or 1.0
        ys = [((y.double() - mean) / scale).to(y.dtype) for y in ys]

    def rows(part_code: int) -> Rows:
        is_selected = [torch.from_numpy(part == part_code) for part in parts]
        return Rows.stack([x[rows] for x, rows in zip(xs, is_selected)], [y[rows] for y, rows in zip(ys, is_selected)])

    placement = pd.DataFrame(
        {
            "client": np.repeat(np.array(names, dtype=object), [len(y) for y in ys]),
            "row": np.concatenate([np.arange(len(y)) for y in ys]),
            "part": np.array(PARTS)[np.concatenate(parts)],
        }
    )
    metadata = {"target_mean": mean, "target_scale": scale, "placement": placement, "title": "the arrays"}
    has_column = all(client_rows.has_column for client_rows in rows_of_client.values())
    metadata |= {"notes": notes, "items": items, "target_column": has_column}
    return Clients(tuple(names), rows(0), rows(1), rows(2), kind=kind, classes=classes, **metadata)


def drop_small_clients(
    rows_of_client: dict[str, ClientRows], min_rows: int, drop_small: bool
) -> tuple[list[int], str | None]:
    """Return the places of the clients that can be split, and a note on the others, which are refused unless they may
    be dropped."""
    names, least = list(rows_of_client), max(min_rows, MIN_ROWS_TO_SPLIT)
    small = [i for i, client_rows in enumerate(rows_of_client.values()) if not has_enough_rows(client_rows, least)]
    if not small:
        return list(range(len(names))), None
    first = rows_of_client[names[small[0]]]
    if not drop_small:
        shortage = f"{count_phrase(len(first.y), 'row')}; at least {least} are needed"
        reason = shortage if first.part is None else "no training rows"
        raise RequestError(f"client '{names[small[0]]}' has {reason}. Use drop_small to leave such clients out.")
    if len(small) == len(names):
        raise RequestError("every client is too small to train, validate and test.")
    small_names = ", ".join(f"'{names[i]}'" for i in small[:6])
    note = f"{count_phrase(len(small), 'client')} too small to split left out: {small_names}."
    return [i for i in range(len(names)) if i not in small], note


def number_items(source: Any) -> tuple[Any, Any]:
    """Return the source with numbers of items in place of inputs that are not tensors, and the items (None: all are
    tensors).

    Such inputs are dictionaries and tuples of tensors in memory, and data sets, which are read item by item whenever a
    minibatch needs them. Targets are read once.
    """
    by_name = dict(source) if isinstance(source, Mapping) else {f"client {i}": value for i, value in enumerate(source)}
    data_by_part = {
        (name, part): value
        for name, values in by_name.items()
        for part, value in (values.items() if is_by_part(values) else [(None, values)])
    }
    if not any(is_structured(value) for value in data_by_part.values()):
        return source, None
    reads_items = any(is_read_by_item(value) for value in data_by_part.values())
    lazy, collates, numbered, start = [], [], {}, 0
    for (name, part), value in data_by_part.items():
        label = f"client '{name}'" + (f", {part}" if part else "")
        collate = None
        if isinstance(value, DataLoader):
            collate = None if value.collate_fn in (default_collate, default_convert) else value.collate_fn
            value = sampled_rows(value, label)
        value = list(value) if isinstance(value, IterableDataset) else value
        if isinstance(value, TensorDataset) and not reads_items:
            value = (tuple(value.tensors[:-1]) if len(value.tensors) > 2 else value.tensors[0], value.tensors[-1])
        inputs, y = read_targets(value, label, collate)
        lazy.append(inputs)
        collates.append(collate)
        numbered[name, part] = (torch.arange(start, start + len(y)), y)
        start += len(y)
    if all(isinstance(inputs, Mapping | tuple) and not isinstance(inputs, Dataset) for inputs in lazy):
        items: TensorItems | DatasetItems = TensorItems(concatenate(lazy))
    elif any(isinstance(inputs, Mapping | tuple) for inputs in lazy):
        raise RequestError("the clients' data must be of one form: tensors of all clients, or data sets of all.")
    else:
        items = DatasetItems(lazy, collates)
    out: JsonObject = {}
    for (name, part), pair in numbered.items():
        if part is None:
            out[name] = pair
        else:
            out.setdefault(name, {})[part] = pair
    return out, items


def is_by_part(value: object) -> bool:
    """Return whether a client's data are a dictionary of parts."""
    return isinstance(value, Mapping) and set(value) <= set(PARTS)


def is_structured(value: object) -> bool:
    """Return whether inputs are several tensors, a dictionary, or a data set that is read item by item."""
    if is_read_by_item(value):
        return True
    value = value.dataset if isinstance(value, DataLoader) else value
    if isinstance(value, TensorDataset):
        return len(value.tensors) != 2
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], Mapping | tuple)


def is_read_by_item(value: object) -> bool:
    """Return whether a minibatch reads its items from a data set, by a function of the user's or in its own order."""
    if isinstance(value, DataLoader):
        is_plain = value.collate_fn in (default_collate, default_convert)
        return not (is_plain and isinstance(value.dataset, TensorDataset))
    return not isinstance(value, TensorDataset) and (isinstance(value, Dataset) or is_sized_dataset(value))


def read_targets(value: Any, label: str, collate: Callable[[list[Any]], Any] | None = None) -> tuple[Any, Tensor]:
    """Return the inputs of a client, in memory or as a data set, and its targets."""
    if isinstance(value, tuple) and len(value) == 2:
        inputs, y = input_tensors(value[0]), target_tensor(value[1], label)
        parts = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
        parts = parts if isinstance(parts, tuple | list) else [parts]
        sizes = {len(part) for part in parts}
        if sizes != {len(y)}:
            raise RequestError(
                f"{label}: inputs and targets must have equally many rows, got {sorted(sizes)}, {len(y)}."
            )
        for part in parts:
            require_finite(part, label)
        return inputs, y
    targets, i = [], 0
    try:
        for i in range(len(value)):
            targets.append(torch.as_tensor(split_item(value[i])[1]))
        y = torch.stack(targets)
    except Exception as error:  # a data set is user code
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"{label}: its items cannot be read (item {i + 1}): {why}.") from error
    if collate is not None:
        check_collated_targets(value, y, collate, label)
    return value, y


def check_collated_targets(
    dataset: Any, y: Tensor, collate: Callable[[list[Any]], Any], label: str, items: int = 2
) -> None:
    """Refuse a `collate_fn` that changes targets, as MixUp does: targets are those of the items, read once."""
    given = y[:items]
    try:
        with torch.random.fork_rng(devices=[]):
            collated = split_item(collate([dataset[i] for i in range(len(given))]))[1]
    except Exception as error:  # user code
        raise RequestError(f"{label}: its collate_fn fails: {error}.") from error
    if (
        not isinstance(collated, Tensor)
        or collated.numel() != given.numel()
        or bool((collated.view_as(given) != given).any())
    ):
        raise RequestError(
            f"{label}: its collate_fn changes the targets, which are read from the items once; mix rows in the model's "
            "forward pass or in the loss instead."
        )


def sampled_rows(loader: DataLoader, label: str) -> Any:
    """Return the data set of a loader, of which a sampler may select a part; how often rows are drawn is not the
    loader's choice."""
    sampler, rows, batches = loader.sampler, loader.dataset, loader.batch_sampler
    if batches is not None:
        sampler = batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(rows, IterableDataset) or isinstance(sampler, SequentialSampler):
        return rows
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler):
        return rows
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(rows, sorted(sampler.indices))
    if isinstance(sampler, list | range) and sampler is not batches and len(set(sampler)) == len(sampler):
        return Subset(rows, list(sampler))
    raise RequestError(
        f"{label}: the loader's {type(sampler).__name__} is not used, since every round draws its own minibatches; "
        "give the data set, and weigh classes in the loss."
    )


def concatenate(parts: list[Inputs]) -> Inputs:
    """Return one structure of tensors from all clients' structures."""
    first = parts[0]
    if isinstance(first, Tensor):
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            raise RequestError("the clients' inputs have different shapes; pad them to one length and add a mask.")
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {name: concatenate([part[name] for part in parts]) for name in first}
    return tuple(concatenate([part[i] for part in parts]) for i in range(len(first)))


def by_group(x: object, y: object, group: object) -> dict[str, ClientRows]:
    """Return the rows of (X, y, groups) by client, in the order of appearance."""
    x, y, group = tensor(x), tensor(y), np.asarray(group)
    if not len(x) == len(y) == len(group):
        raise RequestError(f"X, y and groups must have equally many rows, got {len(x)}, {len(y)} and {len(group)}.")
    labels = np.array([str(label) for label in group], dtype=object)
    return require_equal_shapes(
        {name: ClientRows(x[is_own], y[is_own], None) for name in dict.fromkeys(labels) for is_own in [labels == name]}
    )


def rows_by_client(source: Any) -> dict[str, ClientRows]:
    """Return the rows of a dict by name, or of a list, by client."""
    by_name = source if isinstance(source, Mapping) else {f"client {i}": value for i, value in enumerate(source)}
    return require_equal_shapes({str(name): rows_of(value, f"client '{name}'") for name, value in by_name.items()})


def rows_of(value: object, label: str) -> ClientRows:
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in PARTS]
        if unknown or "train" not in value:
            raise RequestError(f"{label}: a dict names train, validation and test, got {', '.join(map(repr, value))}.")
        pairs = {part: pair_of(value[part], f"{label}, {part}") for part in PARTS if part in value}
        part = np.concatenate([np.full(len(y), PARTS.index(name)) for name, (_, y) in pairs.items()])
        x, y = torch.cat([x for x, _ in pairs.values()]), torch.cat([y for _, y in pairs.values()])
    else:
        (x, y), part = pair_of(value, label), None
    has_column = y.ndim == 2 and y.shape[1] == 1
    return ClientRows(x, y.squeeze(-1) if has_column else y, part, has_column)


def pair_of(value: object, label: str) -> tuple[Tensor, Tensor]:
    if isinstance(value, DataLoader):
        value = sampled_rows(value, label)
    if isinstance(value, Dataset):
        x, y = stack_items(value, label)
    elif isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[0], Dataset | DataLoader):
        x, y = tensor(value[0]), target_tensor(value[1], label)
    else:
        raise RequestError(f"{label}: a client's rows are {ROW_FORMS}; got {type(value).__name__}.")
    if len(x) != len(y):
        raise RequestError(f"{label}: x and y must have equally many rows, got {len(x)} and {len(y)}.")
    require_finite(x, label)
    require_finite(y, label, "targets")
    return x, y


def stack_items(dataset: Any, label: str) -> tuple[Tensor, Tensor]:
    """Return all items (x, y) of a torch data set as two tensors."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        x, y = dataset.tensors
    else:
        items = [dataset[i] for i in range(len(dataset))]
        if not items or any(not isinstance(item, (tuple, list)) or len(item) != 2 for item in items):
            raise RequestError(f"{label}: a data set must have items (x, y), and at least one.")
        xs, ys = [torch.as_tensor(x) for x, _ in items], [torch.as_tensor(y) for _, y in items]
        position = next((i for i, x in enumerate(xs) if x.shape != xs[0].shape), None)
        if position is not None:
            shapes = f"{tuple(xs[position].shape)}, the first {tuple(xs[0].shape)}"
            raise RequestError(f"{label}: item {position + 1} has the shape {shapes}; all must be alike.")
        x, y = torch.stack(xs), torch.stack(ys)
    return x, y


def tensor(values: object) -> Tensor:
    """Return a tensor on the CPU; numbers in double precision become single, as networks use them."""
    if isinstance(values, Tensor) and (values.is_nested or values.layout != torch.strided):
        raise RequestError(
            "arrays for a network are dense; got a sparse or nested tensor: use to_dense(), or pad rows."
        )
    try:
        if not isinstance(values, Tensor):
            array = np.asarray(values)
            values = torch.as_tensor(array if array.flags.writeable else array.copy())
        result = values.detach().cpu()
    except (TypeError, ValueError):
        raise RequestError(
            f"arrays for a network hold numbers, one shape for all rows; got text, objects or rows of unequal lengths "
            f"({type(values).__name__}). Number the classes 0, 1, ..., pad rows, and make sparse matrices dense."
        ) from None
    if not result.ndim:
        raise RequestError(f"arrays for a network have one entry per row, got the single number {result.item()}.")
    return result.float() if result.dtype in (torch.float64, torch.float16, torch.bfloat16) else result


def target_tensor(values: object, label: str) -> Tensor:
    """Return targets as a tensor; several targets of a row are columns of one array."""
    if isinstance(values, Mapping) or (isinstance(values, tuple) and any(np.ndim(part) for part in values)):
        raise RequestError(
            f"{label}: several targets are given as a {type(values).__name__}; make them columns of one array, as "
            "torch.stack([a, b], 1) does, and let the loss take its columns."
        )
    return tensor(values)


def input_tensors(values: object) -> Any:
    """Return inputs of several arrays with a tensor in place of each."""
    if isinstance(values, Mapping):
        return {name: tensor(part) for name, part in values.items()}
    return tuple(tensor(part) for part in values) if isinstance(values, tuple) else tensor(values)


def require_equal_shapes(rows_of_client: dict[str, ClientRows]) -> dict[str, ClientRows]:
    first, reference = next(iter(rows_of_client.items()))
    for name, client_rows in rows_of_client.items():
        for kind, values, expected in (("inputs", client_rows.x, reference.x), ("targets", client_rows.y, reference.y)):
            if values.shape[1:] != expected.shape[1:]:
                shapes = f"{tuple(values.shape[1:])}, unlike {tuple(expected.shape[1:])} of client '{first}'"
                raise RequestError(f"client '{name}': the {kind} have the shape {shapes}.")
    return rows_of_client


def targets(
    ys: list[Tensor], names: list[str], kind: str | None, loss_type: str | None = None
) -> tuple[str, tuple[str, ...], list[Tensor]]:
    """Return the target's kind, the classes, and the targets as a network takes them.

    Whole numbers are classes as they are (0, 1, 2, ...), numbers a regression, and several columns of 0 and 1 are
    labels. A loss of classes takes whole numbers 0 and 1 of tokens or pixels, and a binary one also the numbers 0.0
    and 1.0.
    """
    values = torch.cat([y.reshape(len(y), y.shape[1:].numel()) for y in ys])
    if not len(values):
        raise RequestError("no client has any rows.")
    several = ys[0].ndim > 1
    is_integer = not values.dtype.is_floating_point
    if kind is None:
        yes_or_no = bool(((values == 0) | (values == 1)).all())
        kind = CLASSES if is_integer else REGRESSION
        if several and yes_or_no and not (is_integer and loss_type == CLASSES):
            kind = MULTILABEL
        elif not several and yes_or_no and (is_integer or loss_type == BINARY):
            kind = BINARY
    if several and kind in (BINARY, COUNT):
        raise RequestError(f"a target that is {kind} has one value per row, got the shape {tuple(ys[0].shape[1:])}.")
    if kind not in (BINARY, CLASSES):
        return kind, (), [y.float() for y in ys]
    values = values[values != IGNORED_CLASS] if several else values
    if not len(values):
        raise RequestError(f"no row has a target: all are {IGNORED_CLASS}.")
    low, high = int(values.min()), int(values.max())
    if kind == BINARY and high > 1:
        raise RequestError(
            f"target_type = 'binary' has the classes 0 and 1, but there is a class {high}; use 'classes'."
        )
    if low < 0 or bool((values != values.long()).any()):
        raise RequestError(
            "classes are the whole numbers 0, 1, 2, ...; give target_type = 'regression' for other numbers."
        )
    if high > max(10, len(values) // 2):
        raise RequestError(
            f"the targets are whole numbers up to {high} in {len(values)} rows: too many classes to learn. Give "
            "target_type = 'regression' if they are amounts."
        )
    return kind, tuple(str(i) for i in range(max(high + 1, 2))), [y.long() for y in ys]


def describe_targets(kind: str, classes: tuple[str, ...], ys: list[Tensor]) -> list[str]:
    if kind in (BINARY, CLASSES):
        return [
            f"The targets are whole numbers, taken as {len(classes)} classes; "
            "target_type = 'regression' makes them amounts."
        ]
    return [f"The targets have {ys[0].shape[1]} columns of 0 and 1, taken as labels."] if kind == MULTILABEL else []


def has_enough_rows(client_rows: ClientRows, min_rows: int) -> bool:
    return len(client_rows.y) >= min_rows if client_rows.part is None else bool((client_rows.part == TRAIN).any())


def parts_of(
    parts: list[np.ndarray | None], ys: list[Tensor], names: list[str], kind: str, split: Any, seed: int
) -> list[np.ndarray]:
    """Return the part of every row of every client: as given, or by a random split of each client's rows."""
    code = np.repeat(np.arange(len(ys)), [len(y) for y in ys])
    keys = np.array([client_key(name) for name in names], dtype=np.uint64)
    strata = torch.cat(ys).numpy() if kind in (BINARY, CLASSES) and ys[0].ndim == 1 else None
    random_parts = random_split(code, keys, seed, strata, parse_shares(split))
    return [random_parts[code == i] if part is None else part for i, part in enumerate(parts)]
