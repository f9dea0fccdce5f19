"""All that Mooring changes in Flower, or uses of it that is not its public interface: one place, each with its reason.

    Noticing               the server's app learns that an answer with replies was lost, and asks again
    end_connections        a client's connection ends where an answer was lost, instead of waiting for ever
    tame                   Flower ends or interrupts its process where a connection fails: here the connection ends
    be_patient             an app's process may take longer to start than 30 seconds
    shorten_backoff        a message's parts are pulled again after 10 ms, not after a second
    serve_behind           the SuperLink's application is wrapped by the gateway
    send_secret            Flower's own processes on the server's host send the secret that the gateway asks for

`PRIVATE_NAMES` lists every private name in use; a version of Flower that lacks one of them is refused by
`check_flower`, and any other is accepted.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import httpx
from flwr.app import Message

from mooring.core.errors import RequestError

LOST_RESPONSE_ERRORS = (
    httpx.ReadError,
    httpx.ReadTimeout,
    httpx.RemoteProtocolError,
)  # the request may have been heard and obeyed
START_SECONDS, HEARTBEAT_SECONDS = 300.0, 60.0  # of an app's process: to start, and from one heartbeat to the next
FIRST_PULL_SECONDS, MAX_PULL_SECONDS = 0.01, 1.0  # seconds between attempts to pull a part that has not arrived
OLDEST_VERSION = (1, 41)
PRIVATE_NAMES = (
    "flwr.cli.build:build_fab_from_files",
    "flwr.cli.cli_client_interceptor:CliClientHttpInterceptor",
    "flwr.common.serde:fab_to_proto",
    "flwr.common.serde:message_from_proto",
    "flwr.common.serde:message_to_proto",
    "flwr.common.serde:user_config_to_proto",
    "flwr.proto.control_pb2:ListNodesRequest",
    "flwr.proto.control_pb2:ListRunsRequest",
    "flwr.proto.control_pb2:RegisterNodeRequest",
    "flwr.proto.control_pb2:StartRunRequest",
    "flwr.proto.control_pb2:StopRunRequest",
    "flwr.proto.control_pb2:UnregisterNodeRequest",
    "flwr.proto.fleet_pb2:DeactivateNodeRequest",
    "flwr.proto.message_pb2:Message",
    "flwr.supercore.app_utils:start_parent_process_monitor",
    "flwr.supercore.cli:flower_superexec",
    "flwr.supercore.control:ControlHttpClient",
    "flwr.supercore.corestate.in_memory_corestate:HEARTBEAT_DEFAULT_INTERVAL",
    "flwr.supercore.corestate.in_memory_corestate:HEARTBEAT_PATIENCE",
    "flwr.supercore.corestate.sql_corestate:HEARTBEAT_DEFAULT_INTERVAL",
    "flwr.supercore.corestate.sql_corestate:HEARTBEAT_PATIENCE",
    "flwr.supercore.fab:Fab",
    "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects",
    "flwr.supercore.inflatable.inflatable_object:get_object_tree",
    "flwr.supercore.inflatable.inflatable_object:iterate_object_tree",
    "flwr.supercore.inflatable.inflatable_object:no_object_id_recompute",
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents",
    "flwr.supercore.inflatable.inflatable_utils:pull_objects",
    "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor",
    "flwr.supercore.protobuf.client:ProtobufClient",
    "flwr.supercore.retry.http_retry:os",
    "flwr.supercore.retry:make_simple_http_retry_invoker",
    "flwr.supercore.run:RunNotRunningException",
    "flwr.superlink.cli.flower_superlink:uvicorn",
    "flwr.superlink.cli:flwr_serverapp",
    "flwr.superlink.grid.http_grid:pull_objects",
    "flwr.supernode.cli.flower_supernode:flower_supernode",
    "flwr.supernode.fleet_http_client:FleetHttpClient",
    "flwr.supernode.fleet_http_connection:flwr_exit",
    "flwr.supernode.fleet_http_connection:http_request_response",
    "flwr.supernode.fleet_http_connection:make_simple_http_retry_invoker",
    "flwr.supernode.fleet_http_connection:os",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor",
    "flwr.supernode.start_client_internal:pull_objects",
)


class ConnectionLostError(Exception):
    """The SuperLink could not be reached, or refused us."""


def missing_names() -> list[str]:
    """Those of PRIVATE_NAMES that the installed Flower does not have."""
    missing = []
    for name in PRIVATE_NAMES:
        module, _, what = name.partition(":")
        try:
            getattr(importlib.import_module(module), what)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing


def check_flower() -> None:
    """Refuse a version of Flower that lacks what is used here."""
    import flwr

    number = tuple(int(part) for part in flwr.__version__.split(".")[:2])
    if number < OLDEST_VERSION or (missing := missing_names()):
        lacks = "" if number < OLDEST_VERSION else f" (it lacks {missing[0]})"
        raise RequestError(
            f"flwr {flwr.__version__} does not fit{lacks}; install flwr 1.41.0, or leave out --embedded."
        )


class LossDetectingGrid:
    """Flower's grid. After a pull of messages, `lost` says whether an answer that may have brought some was lost.

    Flower would pull again, and what was in the lost answer would never come: the SuperLink has delivered it. The
    server then asks again all that have not answered; every request can be answered twice."""

    def __init__(self, grid: Any):
        self.grid, self.lost = grid, False
        usual = grid._retry_invoker.should_giveup

        def noticed(error: Exception) -> bool:
            self.lost = self.lost or isinstance(error, LOST_RESPONSE_ERRORS)
            return bool(usual(error))

        grid._retry_invoker.should_giveup = noticed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.lost = False
        return list(self.grid.pull_messages(message_ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def end_connection_on_loss(until: Callable[[], bool] = lambda: False) -> None:
    """Let Flower's connections of this process end where an answer is lost, and where `until` says that all is done.

    Once the connection is made anew the server sees that the node was activated again, and sends again what was not
    answered."""
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supernode import fleet_http_connection as connection

    def invoker() -> Any:
        made = make_simple_http_retry_invoker()
        usual: Any = made.should_giveup
        made.should_giveup = lambda error: until() or isinstance(error, LOST_RESPONSE_ERRORS) or usual(error)
        return made

    connection.make_simple_http_retry_invoker = invoker


def contain_connection_failures(until: Callable[[], bool]) -> None:
    """Flower ends its process where a connection fails, and interrupts it where a signature is refused (401): here only
    the connection ends. Nothing is tried again once all is done."""
    from flwr.supercore.retry import http_retry
    from flwr.supernode import fleet_http_connection as connection

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    end_connection_on_loss(until)
    connection.flwr_exit = raise_instead_of_exit  # type: ignore[assignment]
    for module in (connection, http_retry):
        module.os = RefusedSignal()  # type: ignore[attr-defined]


class RefusedSignal:
    """The module `os` for Flower's connection: a signal to this process becomes an error instead."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def kill(self, process: int, signal: int) -> None:
        raise ConnectionLostError("401: the SuperLink refused our signature")


def raise_instead_of_exit(code: int, message: str | None = None, *rest: Any, **more: Any) -> None:
    """What Flower calls to end the process."""
    raise ConnectionLostError(message or f"Flower's exit code {code}")


def extend_start_timeout() -> None:
    """Let an app's process take longer to start than Flower's 30 seconds.

    A process that is later finds its task's token expired (401), while another is started in its place: on a busy
    machine, where starting takes long, that makes it busier, and none of them ever comes in time."""
    for module in ("in_memory_corestate", "sql_corestate"):
        state: Any = importlib.import_module(f"flwr.supercore.corestate.{module}")
        state.HEARTBEAT_DEFAULT_INTERVAL = START_SECONDS
        state.HEARTBEAT_PATIENCE = HEARTBEAT_SECONDS / START_SECONDS


def shorten_backoff() -> None:
    """Pull a message's parts again after 10 ms: Flower shows a message before its parts are there, and then sleeps a
    second."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    quick = partial(
        pull_objects, initial_backoff=FIRST_PULL_SECONDS, backoff_cap=MAX_PULL_SECONDS, max_tries_per_object=None
    )
    for name in ("flwr.superlink.grid.http_grid", "flwr.supernode.start_client_internal"):
        module: Any = importlib.import_module(name)
        module.pull_objects = quick


def wrap_superlink(wrap: Callable[[Any], Any], **options: Any) -> Any:
    """The module of Flower's SuperLink, whose server then serves `wrap(application)` with more options of uvicorn."""
    module: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its function has the same name
    serve = module.uvicorn.run

    def serve_wrapped(app: Any, **known: Any) -> None:
        serve(wrap(app), **known | options)

    module.uvicorn.run = serve_wrapped
    return module


def add_secret_header(name: str, secret: str) -> None:
    """All of Flower's HTTP clients of this process send a header with the gateway's secret."""
    from flwr.supercore.protobuf.client import ProtobufClient

    usual: Any = ProtobufClient.__init__

    def init(self: Any, *given: Any, **known: Any) -> None:
        usual(self, *given, **known)
        self._client.headers[name] = secret

    ProtobufClient.__init__ = init  # type: ignore[method-assign]
