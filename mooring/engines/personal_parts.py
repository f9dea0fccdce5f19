"""Coefficients that clients do not send: a head, adapters, BatchNorm statistics.

Every client has its own copy of the coefficients that `personal` names, which is never sent. An algorithm sees, instead
of the server's tensors [d], a tensor [C, d] with each client's own numbers there; what its server would make of the
client's single message is the client's next copy. So FedPer is FedAvg with a personal head, and of Ditto, FedProx and
APFL the named part of the global model is the client's own as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, StateTree
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.task import Task, personal_mask
from mooring.core.types import NamedValues
from mooring.engines.client_states import extend_state, split_state

MOVES_BEYOND_THE_MEAN = ("feddyn",)  # algorithms whose server adds a state to the mean model
OWN = "own_"  # begins the names of a client's copies of the server's tensors
PLAIN_SERVER = {"server_optimizer": "sgd", "server_step": 1.0, "server_decay": 0.0, "aggregation": "average"}


def name_personal_parts(settings: NamedValues, model: object) -> NamedValues:
    """The hyperparameters, in which `personal`, given as a function of parameter names, is the list of those names."""
    chosen = settings.get("personal", "")
    if not callable(chosen):
        if not isinstance(chosen, str | list | tuple):
            raise RequestError(f"personal names parts of the model: a name, a list or a function, got {chosen!r}.")
        return settings
    if not (isinstance(model, nn.Module) or callable(model)):
        raise RequestError("personal: a function of parameter names needs the network as `model`; else give names.")
    if isinstance(model, nn.Module):
        module = model
    else:
        accepted = inspect.signature(model).parameters
        with torch.random.fork_rng(devices=[]):  # names do not depend on sizes
            module = model(**{name: size for name, size in (("features", 1), ("classes", 2)) if name in accepted})
    names = [name for name, part in module.named_parameters() if part.requires_grad]
    try:
        personal = [name for name in names if chosen(name)]
    except Exception as error:  # user code
        raise RequestError(f"personal: the function of parameter names fails: {error}.") from error
    if not personal:
        raise RequestError(f"personal: the function chooses none of the parameters {', '.join(names[:6])}, ....")
    return {**settings, "personal": ",".join(personal)}


def keep_personal_parts(algorithm: AnyAlgorithm, task: Task) -> AnyAlgorithm:
    """The algorithm, whose clients keep the coefficients of its `personal` field and of local buffers."""
    check_buffers(algorithm, task)
    mask = personal_mask(task, getattr(algorithm, "personal", ()))
    if not bool(mask.any()) or algorithm.pooled:
        return algorithm
    if algorithm.group == "clustered":
        raise RequestError(f"{algorithm.name}: clusters have no personal parts; set buffers = 'average' or 'frozen'.")
    if getattr(algorithm, "output", "last") == "average" or getattr(algorithm, "agnostic", 0):
        raise RequestError(f"{algorithm.name}: personal parts do not go with output = 'average' or agnostic > 0.")
    return cast(AnyAlgorithm, PersonalParts(algorithm, mask))


def check_buffers(algorithm: AnyAlgorithm, task: Task) -> None:
    """Refuse running statistics that learn where the server does more than average: a variance must stay above 0."""
    if task.gradient_dim == task.dim:
        return
    if algorithm.name in MOVES_BEYOND_THE_MEAN:
        raise RequestError(f"{algorithm.name} does not average running statistics; set buffers = 'frozen'.")
    optimizer = getattr(algorithm, "server_optimizer", "sgd")
    if optimizer != "sgd" and not task.local_buffers:
        raise RequestError(
            f"{algorithm.name}: server_optimizer = {optimizer!r} would move running statistics; "
            "set buffers = 'local' or 'frozen'."
        )


def personal_coefficients(algorithm: AnyAlgorithm) -> Tensor | None:
    """[d] bool: the coefficients that clients keep; None if there are none."""
    return algorithm.mask if isinstance(algorithm, PersonalParts) else None


def drop_personal_entries(
    tensors: Mapping[str, Tensor], first: Mapping[str, Tensor], mask: Tensor
) -> dict[str, Tensor]:
    """Return the tensors [d] of a server's state without the entries of personal coefficients, where these are those of
    the `first` state: clients have that, and use their own copies."""

    def drop(name: str, part: Tensor) -> Tensor:
        initial = first.get(name)
        is_unchanged = initial is not None and part.shape == initial.shape == mask.shape
        return part[~mask] if is_unchanged and torch.equal(part[mask], initial[mask]) else part  # type: ignore[index]

    return {name: drop(name, part) for name, part in tensors.items()}


def restore_personal_entries(
    tensors: Mapping[str, Tensor], first: Mapping[str, Tensor], mask: Tensor
) -> dict[str, Tensor]:
    """Return the tensors that `drop_personal_entries` was given."""
    shared, out = int((~mask).sum()), dict(tensors)
    for name, part in tensors.items():
        if name in first and part.shape == (shared,) and first[name].shape == mask.shape:
            out[name] = first[name].to(part.dtype).clone()
            out[name][~mask] = part
    return out


class PersonalParts:
    """An algorithm whose clients keep the coefficients `mask` [d] to themselves; all else is the algorithm's own."""

    per_client_fields: tuple[str, ...] = ()  # runs are not trained together

    def __init__(self, algorithm: AnyAlgorithm, mask: Tensor):
        self._algorithm, self.mask = algorithm, mask
        self._personal, self._shared = mask.nonzero().flatten(), (~mask).nonzero().flatten()
        self._dim = len(mask)
        field_names = {field.name for field in fields(algorithm)} if is_dataclass(algorithm) else set()
        self._alone = replace(algorithm, **{k: v for k, v in PLAIN_SERVER.items() if k in field_names})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PersonalParts) and self._algorithm == other._algorithm and self._dim == other._dim

    __hash__ = None  # type: ignore[assignment]

    def init(self, task: Task, w0: Tensor) -> tuple[StateTree, StateTree]:
        server, client = self._algorithm.init(task, w0)
        names = (name for name in server._fields if self._is_split(name, server))
        return server, extend_state(client, **{OWN + name: getattr(server, name)[self._personal] for name in names})

    def client_update(self, server: StateTree, client: StateTree, local: LocalTraining) -> tuple[StateTree, StateTree]:
        client, own = split_state(client)
        visible = self._visible_server(server, own)
        state, message = self._algorithm.client_update(visible, client, local)
        if message is not None:
            after = self._alone.server_update(visible, message, local.round._replace(clients=1, cohort=1, weight=1.0))
            personal = {name: getattr(after, name[len(OWN) :]) for name in own}
            own |= {name: part[:, self._personal] for name, part in personal.items() if part is not None}
        return extend_state(state, **own), self._map(message, lambda part: part[..., self._shared])

    def server_update(self, server: StateTree, mean: StateTree, round: Round) -> StateTree:
        def widen(part: Tensor) -> Tensor:
            full = part.new_zeros(*part.shape[:-1], self._dim)
            full[..., self._shared] = part
            return full

        after = self._algorithm.server_update(server, self._map(mean, widen, len(self._shared)), round)
        personal = {}
        for name in server._fields:
            if self._is_split(name, server) and getattr(after, name) is not None:
                personal[name] = getattr(after, name).clone()
                personal[name][self._personal] = getattr(server, name)[self._personal]
        return after._replace(**personal)

    def finetune(self, server: StateTree, client: StateTree, local: LocalTraining) -> StateTree:
        client, own = split_state(client)
        return extend_state(self._algorithm.finetune(self._visible_server(server, own), client, local), **own)

    def personal_model(self, server: StateTree, client: StateTree) -> Tensor:
        client, own = split_state(client)
        return self._algorithm.personal_model(self._visible_server(server, own), client)

    def _is_split(self, name: str, server: StateTree) -> bool:
        part = getattr(server, name)
        return isinstance(part, Tensor) and part.shape == (self._dim,) and name not in self._algorithm.server_only

    def _visible_server(self, server: StateTree, own: Mapping[str, Tensor]) -> StateTree:
        """The server's state with [C, d] in place of [d]: each client's own numbers at its personal coefficients."""
        visible = {}
        for name, part in own.items():
            full = getattr(server, name[len(OWN) :]).expand(len(part), -1).clone()
            full[:, self._personal] = part
            visible[name[len(OWN) :]] = full
        return server._replace(**visible)

    def _map(self, message: StateTree, change: Callable[[Tensor], Tensor], size: int | None = None) -> StateTree:
        """The message with its tensors of one number per coefficient changed."""
        if message is None:
            return None
        size = self._dim if size is None else size
        if isinstance(message, Tensor):
            return change(message) if message.shape[-1] == size else message
        return type(message)(*(self._map(part, change, size) for part in message))
