"""A federation across machines: serve, join, federation up, and the keys."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.commands.common import PlainTyper, RunArgument, app, print_json
from mooring.commands.event_log import JSON, TEXT, EventLog
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.options import Json, TrustCode, split_commas

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooring.remote.client_node import ClientNode
    from mooring.report.terminal import Display

federation = PlainTyper(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a whole federation on this machine.",
    epilog="Example: mooring federation up run.toml --client-dir clients/",
)
keys = PlainTyper(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make certificates and keys for a federation.",
    epilog="Example: mooring keys init keys --names north,south,west",
)
app.add_typer(federation, name="federation")
app.add_typer(keys, name="keys")
FederationOut = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="The run directory. [runs/NAME-federation]")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Connect without TLS, on this machine only.")]
RunArguments = Annotated[list[Path], typer.Argument(hidden=True, metavar="RUN...")]
LogFormat = Annotated[str, typer.Option("--log-format", help="Lines on standard error: text or json.")]


def find_leads() -> dict[str, Callable[..., object]]:
    """Return what leads a run on the server, by its purpose."""
    from mooring.advice.federated.server import advise_federation
    from mooring.remote.serve import FIT_LEADS

    return {**FIT_LEADS, "advise": advise_federation}


def find_kinds() -> dict[str, type[ClientNode]]:
    """Return the clients by the purpose of a run."""
    from mooring.advice.federated.client import AdviceClientNode
    from mooring.remote.client_node import ClientNode

    return {"fit": ClientNode, "advise": AdviceClientNode}


def make_private() -> None:
    """Files that this process makes are readable by their owner only."""
    os.umask(0o077)


def event_log(format_: str) -> EventLog:
    if format_ not in (TEXT, JSON):
        raise RequestError(f"--log-format must be text or json, got {format_!r}.")
    return EventLog(format_)


@app.command(epilog="Example: mooring serve run.toml --keys keys --host 0.0.0.0 --num-clients 3 --out runs/three")
def serve(
    run: RunArguments,
    out: FederationOut = None,
    clients: Annotated[
        int | None, typer.Option("--num-clients", help="Number of clients. [as in [federation]]", show_default=False)
    ] = None,
    key_folder: Annotated[Path | None, typer.Option("--keys", help="Folder made by `mooring keys init`.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 9092,
    insecure: Insecure = False,
    trust_code: TrustCode = False,
    log_format: LogFormat = TEXT,
    json_: Json = False,
) -> None:
    """Serve a federation whose clients join over the network.

    RUN is a run file; several are served one after another, each in its own folder of OUT. Rows stay with the clients.
    What their messages reveal depends on the algorithm, and some reveal personal models: see `reveals` in `mooring list
    algorithms`. With `secure = true` in [federation] the server sees sums of messages only. After a crash, the same
    command resumes.
    """
    from mooring.remote.serve import serve as serve_runs
    from mooring.report.terminal import Display

    make_private()
    display, log = Display(json_), event_log(log_format)
    out = out or Path("runs") / f"{run[0].stem}-federation"
    with display.progress() as on_progress:
        directories = serve_runs(
            run, out, key_folder=key_folder, host=host, port=port, insecure=insecure, clients=clients, trust=trust_code,
            leads=find_leads(), report=log.write_message, on_progress=log.follow(on_progress),
        )  # fmt: skip
    for directory in directories:
        show_federation(display, directory, json_)


@app.command(epilog="Example: mooring join run.toml --data me.csv --state me --server host:9092 --ca ca.crt --key me")
def join(
    run: RunArguments,
    data: Annotated[Path, typer.Option("--data", help="This client's own table.")],
    state: Annotated[Path, typer.Option("--state", help="Folder for what this client keeps.")],
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server is.")] = (
        "127.0.0.1:9092"
    ),
    name: Annotated[str | None, typer.Option("--name", help="This client's name. [the file's]")] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="The federation's certificate, ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This client's private key.")] = None,
    peers: Annotated[
        Path | None, typer.Option("--peers", help="The clients' public keys, peers.json, for secure sums.")
    ] = None,
    insecure: Insecure = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="This client's rules for what may leave: policy.toml.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Let rows that were added up before take part with other clients.")
    ] = False,
    trust_code: TrustCode = False,
    log_format: LogFormat = TEXT,
    json_: Json = False,
) -> None:
    """Join a federation with one client's table.

    RUN is the same run file as the server's; with several, the client takes part in each of them. Rows stay on this
    machine; what the messages reveal depends on the algorithm (`mooring list algorithms`). After a crash, the same
    command resumes.
    """
    from mooring.remote.join import join as join_runs
    from mooring.remote.messages import printable
    from mooring.report.terminal import Display

    make_private()
    log = event_log(log_format)
    results = join_runs(
        run, data, state, server=server, name=name, ca=ca, key=key, peers=peers, insecure=insecure,
        policy=policy, again=again, trust=trust_code, kinds=find_kinds(),
        report=log.write_message,
    )  # fmt: skip
    if json_:
        print_json(results[0] if len(run) == 1 else results)
        return
    for result in results:
        sentence = result["said"] if "said" in result else describe_test_loss(result)
        Display().print_line(f"{printable(sentence)}\nPredict: mooring predict {result['result']} new.csv")


def describe_test_loss(result: JsonObject) -> str:
    """A client's own test loss beside that of its local model, with the interval of the difference."""
    text = f"Test {result['metric']} of your personal model: {result['personal']:.4g}"
    if result.get("local") is None:
        return f"{text}."
    text = f"{text}; of your local model: {result['local']:.4g}"
    low, high = (result.get(f"improvement_over_local_ci_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return f"{text}. You have too few test rows for an interval."
    if low == high == 0:
        return f"{text}: the same model."
    return f"{text}. Difference, 95% CI: {low:.3g} to {high:.3g}{'' if low > 0 or high < 0 else ', which includes 0'}."


@federation.command("up", epilog="Example: mooring federation up run.toml --client-dir clients/")
def federation_up(
    run: RunArgument,
    clients: Annotated[Path, typer.Option("--client-dir", help="Folder with one table per client.")],
    out: FederationOut = None,
    insecure: Insecure = False,
    transport: Annotated[
        str, typer.Option("--transport", help="http, flower (its SuperLink) or simulation (Flower's, on Ray).")
    ] = "http",
    trust_code: TrustCode = False,
    log_format: LogFormat = TEXT,
    json_: Json = False,
) -> None:
    """Run server and clients on this machine, to try it out.

    Each client is a process of its own, which connects over TLS; Flower's nodes connect without it, on this machine.

    RUN is a run file. Keys, logs and the clients' folders are in OUT.federation.
    """
    from mooring.remote.serve import run_local_federation
    from mooring.report.terminal import Display

    make_private()
    display, log = Display(json_), event_log(log_format)
    out = out or Path("runs") / f"{run.stem}-federation"
    with display.progress() as on_progress:
        follow = log.follow(on_progress)
        if transport == "http":
            run_local_federation(
                run, clients, out, insecure=insecure, trust=trust_code, leads=find_leads(), report=log.write_message,
                on_progress=follow,
            )  # fmt: skip
        elif transport == "flower":
            from mooring.remote.flower import run_flower_federation

            run_flower_federation(run, clients, out, find_kinds(), find_leads(), log.write_message, follow)
        elif transport == "simulation":
            from mooring.remote.flower import run_simulation

            run_simulation(run, clients, out, log.write_message, follow)
        else:
            raise RequestError(f"--transport must be http, flower or simulation, got {transport!r}.")
    show_federation(display, out, json_)


@federation.command("app", epilog="Example: mooring federation app run.toml app")
def federation_app(run: RunArgument, folder: Annotated[Path, typer.Argument(hidden=True, metavar="FOLDER")]) -> None:
    """Write a Flower app for your own SuperLink.

    `flwr run` starts it on your SuperLink and SuperNodes.

    RUN is a run file, FOLDER the app's new folder.
    """
    from mooring.remote.flower import write_app
    from mooring.report.terminal import Display

    write_app(run, folder, find_kinds(), find_leads())
    Display().print_line(
        f'`flwr run {folder} NAME --stream --run-config \'out="runs/one" clients="3"\'` starts it, NAME being a '
        "SuperLink of Flower's own config.toml."
    )


@keys.command("init", epilog="Example: mooring keys init keys --names north,south,west --host fed.example.org")
def keys_init(
    folder: Annotated[Path, typer.Argument(hidden=True)],
    clients: Annotated[list[str], typer.Option("--names", metavar="A,B", help="The clients' names.")],
    host: Annotated[list[str] | None, typer.Option("--host", metavar="A,B", help="The server's host names.")] = None,
) -> None:
    """Make the certificates and every client's key.

    What FOLDER already contains is kept: the certificate authority, the server's certificate, keys.
    """
    written = key_functions().init(folder, split_commas(clients) or [], split_commas(host) or [])
    show(f"{len(written)} files in {folder}. A client needs ca.crt and its own file of clients/.")


KeyFolder = Annotated[Path, typer.Argument(hidden=True, metavar="FOLDER")]


@keys.command("request", epilog="Example: mooring keys request north --out keys")
def keys_request(
    name: Annotated[str, typer.Argument(hidden=True, metavar="NAME")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the private key and the request.")] = Path("keys"),
) -> None:
    """Make this client's key and a request to join.

    Send the request to the server's operator; the private key stays here.
    """
    module = key_functions()
    private, request = module.request(name, out)
    show(f"{private} is this client's key: keep it. Send {request} to the server's operator.")


@keys.command("enroll", epilog="Example: mooring keys enroll keys north.request")
def keys_enroll(folder: KeyFolder, request: Annotated[Path, typer.Argument(hidden=True, metavar="REQUEST")]) -> None:
    """Let the client of a request join.

    This also works during a run.
    """
    name = key_functions().enroll(folder, request)
    show(f"Client '{name}' is enrolled. It needs {folder / 'ca.crt'}, and for secure sums {folder / 'peers.json'}.")


@keys.command("rotate", epilog="Example: mooring keys rotate keys north.request")
def keys_rotate(folder: KeyFolder, request: Annotated[Path, typer.Argument(hidden=True, metavar="REQUEST")]) -> None:
    """Replace a client's key by that of a new request.

    The old key is revoked.
    """
    name = key_functions().enroll(folder, request, replace=True)
    show(f"Client '{name}' has a new key; its old one is refused from now on.")


@keys.command("revoke", epilog="Example: mooring keys revoke keys north")
def keys_revoke(folder: KeyFolder, name: Annotated[str, typer.Argument(hidden=True, metavar="NAME")]) -> None:
    """Revoke a client's key.

    A running server refuses it within seconds.
    """
    revoked = key_functions().revoke(folder, name)
    show(f"The key of client '{name}' is refused from now on; {revoked} keeps it from being enrolled again.")


@keys.command("renew", epilog="Example: mooring keys renew keys --host fed.example.org")
def keys_renew(
    folder: KeyFolder,
    host: Annotated[list[str] | None, typer.Option("--host", metavar="A,B", help="More host names.")] = None,
) -> None:
    """Make a new certificate of the server.

    It is for the present host names and those of --host; clients keep their files.
    """
    module = key_functions()
    module.renew(folder, split_commas(host) or [])
    show(f"server.pem is for {', '.join(module.hosts_of(folder))}. Start `mooring serve` again to use it.")


def key_functions() -> ModuleType:
    make_private()
    from mooring.remote import keys as module

    return module


def show(sentence: str) -> None:
    from mooring.report.terminal import Display

    Display().print_line(sentence)


def show_federation(display: Display, out: Path, json_: bool) -> None:
    """The result of a finished run: of a fit, or of advise with its report."""
    from mooring.commands.training import show_written
    from mooring.run_verbs import as_json, show_run
    from mooring.runs.directory import open_run

    directory = open_run(out)
    if directory.run.mooring.purpose == "advise":
        advice = directory.advice
        if not advice["clients"] or "recommended" not in advice["summary"]:
            if json_:
                print_json(as_json(directory, out))
                return
            display.paragraph(advice["headline"])
            display.paragraph(advice["words"]["losses"])
            display.paragraph("Each client has its own result; the server has too little of them for a report.")
            return
        show_written(display, out, as_json(directory, out) if json_ else None)
    elif json_:
        print_json(as_json(directory, out))
    else:
        show_run(display, out)
