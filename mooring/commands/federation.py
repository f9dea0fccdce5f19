"""A federation across machines: serve, join, federation up, keys init."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import Run, app, emit
from mooring.options import Json, Out, by_commas

federation = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A federation across processes.",
    epilog="Example: mooring federation up run.toml --clients clients/ --embedded",
)
keys = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Certificates and keys of a federation.",
    epilog="Example: mooring keys init keys --clients north,south,west",
)
app.add_typer(federation, name="federation")
app.add_typer(keys, name="keys")
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS, on this machine only.")]
Embedded = Annotated[
    bool, typer.Option("--embedded", help="Answer in this process, not through Flower's own node: quicker.")
]


@app.command(epilog="Example: mooring serve run.toml --keys keys --host 0.0.0.0 --clients 3 --out runs/three")
def serve(
    run: Run,
    out: Out = None,
    clients: Annotated[
        int | None, typer.Option("--clients", help="How many take part. [as [federation] says]", show_default=False)
    ] = None,
    key_folder: Annotated[Path | None, typer.Option("--keys", help="Folder made by `mooring keys init`.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 9092,
    insecure: Insecure = False,
    json_: Json = False,
) -> None:
    """Lead a federation whose clients `mooring join` from their own machines; the same command goes on after a crash.

    RUN is a run file. Rows and personal models stay with the clients.
    """
    from mooring.engines.flower.federation import serve as lead
    from mooring.report.terminal import Display

    display = Display(json_)
    out = out or Path("runs") / f"{run.stem}-federation"
    with display.progress() as tell:
        lead(
            run, out, key_folder=key_folder, host=host, port=port, insecure=insecure, clients=clients, say=whisper,
            tell=tell,
        )  # fmt: skip
    show_federation(display, out, json_)


@app.command(epilog="Example: mooring join run.toml --data me.csv --state me --server host:9092 --ca ca.crt --key me")
def join(
    run: Run,
    data: Annotated[Path, typer.Option("--data", help="This client's own table.")],
    state: Annotated[Path, typer.Option("--state", help="Folder for what this client keeps.")],
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server is.")] = (
        "127.0.0.1:9092"
    ),
    name: Annotated[str | None, typer.Option("--name", help="This client's name. [the file's]")] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="The federation's certificate, ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This client's private key.")] = None,
    insecure: Insecure = False,
    embedded: Embedded = False,
    json_: Json = False,
) -> None:
    """Take part in a federation with one client's table; the same command goes on after a crash.

    RUN is the same run file as the server's. Rows and the personal model stay in this machine's folders.
    """
    from mooring.advice.at_home import AdvisedHome
    from mooring.engines.flower.home import Home
    from mooring.engines.flower.joining import join as take_part
    from mooring.report.terminal import Display

    told = take_part(
        run, data, state, server=server, name=name, ca=ca, key=key, insecure=insecure, embedded=embedded,
        kinds={"fit": Home, "advise": AdvisedHome}, say=whisper,
    )  # fmt: skip
    if json_:
        emit(told)
    elif "said" in told:
        Display().say(f"{told['said']} `mooring predict {told['result']} NEW.csv` uses your model.")
    else:
        Display().say(
            f"Test {told['metric']} of your own model {told['personal']:.4g}"
            + ("" if told["alone"] is None else f", trained alone {told['alone']:.4g}")
            + ("" if "verdict" not in told else f": {in_a_sentence(told)}")
            + f". `mooring predict {told['result']} NEW.csv` uses it."
        )


def in_a_sentence(told: dict[str, Any]) -> str:
    """What a client's own test rows say of its own model beside training alone."""
    if told["gain_low"] is None:
        return "too few test rows to tell them apart"
    known = {"the same": "the same model", "undecided": "your test rows cannot tell them apart"}
    low, high = (told["gain_low"], told["gain_high"])
    ends = f"saves {low:.3g} to {high:.3g}" if low > 0 else f"costs {-high:.3g} to {-low:.3g} more"
    return known.get(told["verdict"], f"{told['verdict']}, it {ends} a row at 95 %")


@federation.command("up", epilog="Example: mooring federation up run.toml --clients clients/ --embedded")
def federation_up(
    run: Run,
    clients: Annotated[Path, typer.Option("--clients", help="Folder with one table per client.")],
    out: Out = None,
    insecure: Insecure = False,
    embedded: Embedded = False,
    json_: Json = False,
) -> None:
    """A whole federation on this machine, a process per client, over TLS: for trying it out.

    RUN is a run file. Keys, logs and the clients' folders are in OUT.federation.
    """
    from mooring.engines.flower.federation import up
    from mooring.report.terminal import Display

    display = Display(json_)
    out = out or Path("runs") / f"{run.stem}-federation"
    with display.progress() as tell:
        up(run, clients, out, embedded=embedded, insecure=insecure, say=whisper, tell=tell)
    show_federation(display, out, json_)


@federation.command("app", epilog="Example: mooring federation app run.toml app")
def federation_app(run: Run, folder: Annotated[Path, typer.Argument(hidden=True, metavar="FOLDER")]) -> None:
    """Write the Flower app of a run, for a SuperLink and SuperNodes of your own: `flwr run` starts it.

    RUN is a run file, FOLDER the app's new folder.
    """
    from mooring.engines.flower.app_files import write_app
    from mooring.report.terminal import Display

    write_app(run, folder)
    Display().say(
        f'`flwr run {folder} NAME --stream --run-config \'out="runs/one" clients="3"\'` starts it, NAME being a '
        "SuperLink of Flower's own config.toml."
    )


@keys.command("init", epilog="Example: mooring keys init keys --clients north,south,west --host fed.example.org")
def keys_init(
    folder: Annotated[Path, typer.Argument(hidden=True)],
    clients: Annotated[list[str], typer.Option("--clients", metavar="A,B", help="The clients' names.")],
    host: Annotated[list[str] | None, typer.Option("--host", metavar="A,B", help="The server's host names.")] = None,
) -> None:
    """Make a certificate authority, the server's certificate and a key for each client, as far as they lack."""
    from mooring.engines.flower.processes import need_flower
    from mooring.report.terminal import Display

    need_flower()
    from mooring.engines.flower.keys import init

    written = init(folder, by_commas(clients) or [], by_commas(host) or [])
    Display().say(f"{len(written)} files in {folder}. A client needs ca.crt and its own file of clients/.")


def whisper(sentence: str) -> None:
    """What is waited for, where it does not mix with the answer."""
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201


def show_federation(display: Any, out: Path, json_: bool) -> None:
    """The answer of a run that is over: of a fit, or of an advice with its page."""
    from mooring.engines.fit import as_json
    from mooring.report.answers import show_run
    from mooring.runs.directory import open_run

    directory = open_run(out)
    if directory.run.mooring.purpose == "advise":
        from mooring.advice.advise import PRINTED
        from mooring.commands.training import show_written

        told = directory.advice | {"run": str(out)}
        show_written(display, out, {name: told[name] for name in PRINTED} if json_ else None)
    elif json_:
        emit(as_json(directory))
    else:
        show_run(display, out)
