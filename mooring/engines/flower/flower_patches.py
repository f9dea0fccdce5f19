"""Every use of Flower that is not its public interface: the patches first, each with its reason, then wrappers.

    LossDetectingGrid            the server's app notices that a response with replies was lost, and asks again
    end_connection_on_loss       a client's connection ends where a response was lost, instead of waiting for ever
    contain_connection_failures  a failed connection ends, where Flower would end or interrupt its process
    extend_start_timeout         an app's process may take longer to start than 30 seconds
    shorten_backoff              a message's parts are pulled again after 10 ms, not after a second
    wrap_superlink               the SuperLink's application is wrapped by the gateway
    add_secret_header            Flower's own processes on the server's host send the secret that the gateway requires

    NodeConnection, ControlClient, sign_request, message_to_bytes ...   nodes, control interface, signatures, bytes

None of the patches has a public switch in Flower 1.41; docs/operating.md ("Flower's private names") lists what would
make each of them unnecessary. `PRIVATE_NAMES` lists every private name in use: `check_flower` refuses a version of
Flower that lacks one of them, and accepts any other.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.run_pb2 import Run
    from flwr.supercore.protobuf.client import ProtobufClientInterceptor, ProtobufRequestContext
    from flwr.supercore.retry import RetryInvoker
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from starlette.applications import Starlette
    from starlette.types import ASGIApp

LOST_RESPONSE_ERRORS = (
    httpx.ReadError,
    httpx.ReadTimeout,
    httpx.RemoteProtocolError,
)  # the request may have been received and carried out
START_SECONDS, HEARTBEAT_SECONDS = 300.0, 60.0  # for an app's process to start, and between heartbeats
FIRST_PULL_SECONDS, MAX_PULL_SECONDS = 0.01, 1.0  # between attempts to pull a part that has not arrived
OLDEST_VERSION = (1, 41)
KeyPair = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]
PRIVATE_NAMES = (
    "flwr.app.message:make_message",
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
    "flwr.proto.fleet_pb2:RegisterNodeFleetRequest",
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
    "flwr.supercore.inflatable.inflatable_utils:ObjectPullError",
    "flwr.supercore.inflatable.inflatable_utils:ObjectPushError",
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents",
    "flwr.supercore.inflatable.inflatable_utils:pull_objects",
    "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor",
    "flwr.supercore.primitives.asymmetric:public_key_to_bytes",
    "flwr.supercore.protobuf.client:ProtobufClient",
    "flwr.supercore.protobuf.client:ProtobufRequestContext",
    "flwr.supercore.retry.http_retry:os",
    "flwr.supercore.retry:http_retry",
    "flwr.supercore.retry:make_simple_http_retry_invoker",
    "flwr.supercore.run:RunNotRunningException",
    "flwr.superlink.cli.flower_superlink:uvicorn",
    "flwr.superlink.cli:flwr_serverapp",
    "flwr.superlink.grid.http_grid:pull_objects",
    "flwr.supernode.cli.flower_supernode:flower_supernode",
    "flwr.supernode.fleet_http_client:FleetHttpClient",
    "flwr.supernode.fleet_http_connection:flwr_exit",
    "flwr.supernode.fleet_http_connection:generate_key_pairs",
    "flwr.supernode.fleet_http_connection:http_request_response",
    "flwr.supernode.fleet_http_connection:make_simple_http_retry_invoker",
    "flwr.supernode.fleet_http_connection:os",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor",
    "flwr.supernode.start_client_internal:pull_objects",
    "flwr.supernode:fleet_http_connection",
)


class ConnectionLostError(Exception):
    """The SuperLink could not be reached, or refused this client."""


CONNECTION_ERRORS = (ConnectionLostError, httpx.HTTPError, OSError, RuntimeError, ObjectPushError, ObjectPullError)


def missing_names() -> list[str]:
    """Return those of PRIVATE_NAMES that the installed Flower does not have."""
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
    """Flower's grid; after a pull of messages, `lost` is set where a response that may have had some was lost.

    Flower would pull again, and the lost messages would never arrive: the SuperLink has delivered them. The server then
    asks all clients without a reply again; every request can be answered twice."""

    def __init__(self, grid: Any):
        self.grid, self.lost = grid, False
        should_give_up = grid._retry_invoker.should_giveup

        def notice_loss(error: Exception) -> bool:
            self.lost = self.lost or isinstance(error, LOST_RESPONSE_ERRORS)
            return bool(should_give_up(error))

        grid._retry_invoker.should_giveup = notice_loss

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.lost = False
        return list(self.grid.pull_messages(message_ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def end_connection_on_loss(is_finished: Callable[[], bool] = lambda: False) -> None:
    """End Flower's connections of this process where a response is lost, and where `is_finished`.

    When the connection is made again, the server notices that the node was activated again, and repeats what was not
    answered."""
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supernode import fleet_http_connection as connection

    def invoker() -> RetryInvoker:
        invoker = make_simple_http_retry_invoker()
        should_give_up = invoker.should_giveup
        invoker.should_giveup = lambda error: (
            is_finished() or isinstance(error, LOST_RESPONSE_ERRORS) or bool(should_give_up and should_give_up(error))
        )
        return invoker

    connection.make_simple_http_retry_invoker = invoker


def contain_connection_failures(is_finished: Callable[[], bool]) -> None:
    """End only the connection where it fails: Flower would end its process, or interrupt it where a signature is
    refused (401)."""
    from flwr.supercore.retry import http_retry
    from flwr.supernode import fleet_http_connection as connection

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    end_connection_on_loss(is_finished)
    connection.flwr_exit = raise_instead_of_exit  # type: ignore[assignment]
    for module in (connection, http_retry):
        module.os = RefusedSignal()  # type: ignore[attr-defined]


class RefusedSignal:
    """The module `os` for Flower's connection: a signal to this process becomes an error instead."""

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def kill(self, process: int, signal: int) -> None:
        raise ConnectionLostError("401: the SuperLink refused our signature")


def raise_instead_of_exit(code: int, message: str | None = None, *arguments: object, **options: object) -> None:
    """Raise an error where Flower would end the process."""
    raise ConnectionLostError(message or f"Flower's exit code {code}")


def extend_start_timeout() -> None:
    """Allow an app's process longer to start than Flower's 30 seconds.

    A process that is later finds its task's token expired (401), while another is started in its place: on a busy
    machine, where starting takes long, none of them would ever be in time."""
    for module in ("in_memory_corestate", "sql_corestate"):
        state = importlib.import_module(f"flwr.supercore.corestate.{module}")
        vars(state).update(
            HEARTBEAT_DEFAULT_INTERVAL=START_SECONDS, HEARTBEAT_PATIENCE=HEARTBEAT_SECONDS / START_SECONDS
        )


def shorten_backoff() -> None:
    """Pull a message's parts again after 10 ms: Flower announces a message before its parts have arrived, and then
    sleeps for a second."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    quick = partial(
        pull_objects, initial_backoff=FIRST_PULL_SECONDS, backoff_cap=MAX_PULL_SECONDS, max_tries_per_object=None
    )
    for name in ("flwr.superlink.grid.http_grid", "flwr.supernode.start_client_internal"):
        vars(importlib.import_module(name))["pull_objects"] = quick


def wrap_superlink(wrap: Callable[[Starlette], ASGIApp], **options: object) -> ModuleType:
    """Return the module of Flower's SuperLink, whose server serves `wrap(application)` with options of uvicorn."""
    module = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its function has the same name
    serve = module.uvicorn.run

    def serve_wrapped(app: Starlette, **defaults: object) -> None:
        serve(wrap(app), **defaults | options)

    module.uvicorn.run = serve_wrapped
    return module


def add_secret_header(name: str, secret: str) -> None:
    """Let all of Flower's HTTP clients of this process send a header with the gateway's secret."""
    from flwr.supercore.protobuf.client import ProtobufClient

    original = ProtobufClient.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self._client.headers[name] = secret

    ProtobufClient.__init__ = init  # type: ignore[method-assign]


def message_to_bytes(message: Message) -> bytes:
    """Serialize a message, as Flower sends it."""
    from flwr.common.serde import message_to_proto

    return message_to_proto(message).SerializeToString()


def message_from_bytes(content: bytes) -> Message:
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage

    return message_from_proto(ProtoMessage.FromString(content))


def empty_reply(message_id: str) -> Message:
    """Return a reply without content."""
    from flwr.app import Metadata, RecordDict
    from flwr.app.message import make_message

    return make_message(Metadata(0, "", 0, 0, message_id, "", 0.0, 1.0, "query"), content=RecordDict())


def load_command(name: str) -> Callable[[], None]:
    """Return one of Flower's commands."""
    if name == "superexec":
        from flwr.supercore.cli import flower_superexec as command
    elif name == "serverapp":
        from flwr.superlink.cli import flwr_serverapp as command
    else:
        from flwr.supernode.cli.flower_supernode import flower_supernode as command
    return command


def end_with_parent(process: int) -> None:
    """End this process when another one ends."""
    from flwr.supercore.app_utils import start_parent_process_monitor

    start_parent_process_monitor(process)


def generate_key_pair() -> KeyPair:
    from flwr.supernode import fleet_http_connection as connection

    return connection.generate_key_pairs()


def sign_request(pair: KeyPair) -> dict[str, str]:
    """Return the headers with which Flower signs a request."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    request = httpx.Request("POST", "http://unused")
    context = ProtobufRequestContext(rpc_method="", message=DeactivateNodeRequest(), request=request)
    NodeAuthHttpInterceptor(*pair).intercept(context, lambda _: httpx.Response(200))
    return {name: value for name, value in request.headers.items() if name.startswith("flwr-")}


def _fleet_client(server: str, ca: Path | None, pair: KeyPair) -> FleetHttpClient:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signed: list[ProtobufClientInterceptor] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(*pair),
    ]
    return FleetHttpClient.from_server_address(server, ca is None, _read_optional(ca), interceptors=signed)


def _read_optional(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def register_node(server: str, ca: Path | None, pair: KeyPair) -> None:
    """Register a node whose key is not enrolled, where the server allows it (--insecure)."""
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    try:
        with _fleet_client(server, ca, pair) as fleet:
            fleet.RegisterNode(RegisterNodeFleetRequest(public_key=public_key_to_bytes(pair[1])))
    except httpx.HTTPStatusError as error:
        raise ConnectionLostError(f"{error.response.status_code}: the server did not register this node") from error


def deactivate_node(server: str, ca: Path | None, pair: KeyPair, number: int) -> None:
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    with suppress(httpx.HTTPStatusError), _fleet_client(server, ca, pair) as fleet:  # inactive, or a new SuperLink
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=number))


class NodeConnection:
    """An active node of Flower, in this process."""

    def __init__(self, server: str, ca: Path | None, pair: KeyPair):
        from flwr.supernode import fleet_http_connection as connection

        self.context = connection.http_request_response(server, ca is None, _read_optional(ca), pair, 5, 20.0)

    def __enter__(self) -> NodeConnection:
        self.functions = self.context.__enter__()
        self.number = int(self.functions[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self.context.__exit__(kind, error, trace)

    def answer_next(self, answer: Callable[[Message], Message]) -> bool:
        """Answer the next message of Flower; return whether there was one."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
        from flwr.supercore.run import RunNotRunningException

        _, receive, _, _, _, pull_object, _, confirm = self.functions
        try:
            if (received := receive()) is None:
                return False
            head, tree = received
            run, number = head.metadata.run_id, head.metadata.message_id
            contents = pull_objects(
                [part.object_id for part in iterate_object_tree(tree)],
                pull_object_fn=partial(pull_object, run),
                initial_backoff=FIRST_PULL_SECONDS,
                backoff_cap=MAX_PULL_SECONDS,
                max_tries_per_object=None,
            )
            confirm(run, number)
            message = inflate_object_from_contents(number, contents)
            assert isinstance(message, Message)
            message.metadata.__dict__["_message_id"] = number
            started_at = time.monotonic()
            self._send(answer(message), run, started_at)
        except RunNotRunningException:
            pass  # the server was restarted and asks again
        return True

    def _send(self, reply: Message, run: int, started_at: float) -> None:
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        _, _, send, _, _, _, push_object, _ = self.functions
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            object_ids, session = send(reply, get_object_tree(reply), time.monotonic() - started_at)
            for part in object_ids:
                push_object(run, session, part, objects[part].deflate())


class ControlClient:
    """Flower's control interface: nodes and runs of a SuperLink."""

    def __init__(self, server: str, ca: Path | None, headers: Mapping[str, str]):
        from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        interceptors: list[ProtobufClientInterceptor] = [
            CliClientHttpInterceptor(),
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
            _HeaderInterceptor(headers),
        ]
        self.client = ControlHttpClient.from_server_address(
            server_address=server, insecure=ca is None, root_certificates=_read_optional(ca), interceptors=interceptors
        )

    def close(self) -> None:
        self.client.close()

    def list_runs(self) -> Mapping[int, Run]:
        from flwr.proto.control_pb2 import ListRunsRequest

        return self.client.ListRuns(ListRunsRequest()).run_dict

    def stop_run(self, number: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        self.client.StopRun(StopRunRequest(run_id=number))

    def start_run(self, files: Mapping[str, str], config: Mapping[str, str]) -> int:
        """Start an app with these files and this configuration; return the number of Flower's run."""
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content, _ = build_fab_from_files({name: text.encode() for name, text in files.items()})
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        values: JsonObject = dict(config)
        request = StartRunRequest(fab=fab, override_config=user_config_to_proto(values))
        return int(self.client.StartRun(request).run_id)

    def run_status(self, number: int) -> str:
        from flwr.proto.control_pb2 import ListRunsRequest

        run = self.client.ListRuns(ListRunsRequest(run_id=number)).run_dict[number]
        return f"{run.status.status} {run.status.sub_status}".strip()

    def list_nodes(self) -> list[NodeInfo]:
        from flwr.proto.control_pb2 import ListNodesRequest

        nodes = self.client.ListNodes(ListNodesRequest()).nodes_info
        return [node for node in nodes if node.status != "unregistered"]

    def register_node(self, name: str, key: bytes) -> None:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        self.client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def unregister_node(self, number: int) -> None:
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self.client.UnregisterNode(UnregisterNodeRequest(node_id=number))


class _HeaderInterceptor:
    """Sends headers with each request."""

    def __init__(self, headers: Mapping[str, str]):
        self.headers = headers

    def intercept(
        self, context: ProtobufRequestContext, call_next: Callable[[ProtobufRequestContext], httpx.Response]
    ) -> httpx.Response:
        context.request.headers.update(self.headers)
        return call_next(context)
