"""The local page: drop a table, choose its columns, check it, get a recommendation, download the report.

It listens on this machine only. Every address contains a token that is printed for the person who started it, requests
that name another host are refused (a name elsewhere may point to this machine), and the responses forbid every script
but our own and every request to other hosts.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import socket
import zipfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as HttpMessage

from mooring.advice.advise import advise
from mooring.advice.new_clients.personalize import personalize
from mooring.app.jobs import Job, Jobs
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.cures import Cure
from mooring.data.data_checks import SEVERITIES, check
from mooring.data.file_readers import ENDINGS
from mooring.data.load_options import LoadOptions
from mooring.data.role_guesses import describe_columns, guess_client_columns, guess_target_columns
from mooring.data.table_sources import read_source
from mooring.engines.export import export
from mooring.engines.predict import predict, stored_intervals
from mooring.report.html_report import get_environment, read_template, write_report
from mooring.report.report_contents import collect_contents
from mooring.runs.atomic_files import csv_bytes, excel_bytes, write_atomically
from mooring.runs.directory import MODELS_FILE, REPORT_FILE, RUN_FILE, open_run

PACKAGE = "mooring.app"
LOOPBACK = "127.0.0.1"
ALLOWED_HOSTS = [LOOPBACK, "localhost"]
MAX_TABLE_BYTES = 2**31  # of a dropped table
SMALL_CLIENT_ROWS = 5  # clients with fewer rows are left out on request
TABLES, RUNS, PREDICTIONS = "tables", "runs", "predictions"  # the folders of the page
PREDICTION_LEVEL = 0.9  # of prediction intervals
OPTION_TYPES: dict[str, type] = {  # options of a table, in addresses and requests
    "client": str,
    "target": str,
    "drop": list,
    "sheet": str,
    "header_row": int,
    "na": list,
    "categorical": list,
    "merge_levels": list,
    "allow": list,
    "drop_repeats": bool,
    "winsorize": float,
    "drop_small": bool,
}
READING_OPTIONS = ("sheet", "header_row", "na", "categorical")  # those that change how cells are read
CURE_OPTIONS = ("na", "categorical", "merge_levels", "allow", "drop_repeats", "winsorize", "drop_small")
DOWNLOADS = {  # files of a finished run
    "report": "the report, one file that opens offline",
    "models": "each client's recommended model, for `mooring.open` and `mooring predict`",
    "coefficients": "the coefficients of each client's recommended model, as a table",
    "clients": "each client's recommendation, losses and improvements, as a table",
    "run": "all files of the run as a zip archive",
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY + "; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def serve(folder: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the page until it is interrupted; `on_ready` receives its address."""
    os.umask(0o077)  # tables that are dropped here are for their owner only
    (folder / TABLES).mkdir(parents=True, exist_ok=True)
    (folder / RUNS).mkdir(exist_ok=True)
    token = secrets.token_urlsafe(18)
    with socket.socket() as listening:
        try:
            listening.bind((LOOPBACK, port))
            listening.listen()
        except OSError as error:
            raise RequestError(f"port {port} cannot be used ({error.strerror}); choose another --port.") from None
        on_ready(f"http://{LOOPBACK}:{listening.getsockname()[1]}/{token}/")
        make_server(build_app(folder, token)).run(sockets=[listening])


def make_server(app: Starlette) -> uvicorn.Server:
    """Return the server of the page."""
    quiet: JsonObject = {"log_level": "warning", "access_log": False}  # a log of requests would contain the token
    return uvicorn.Server(uvicorn.Config(app, loop="asyncio", ws="none", lifespan="off", **quiet))


def build_app(folder: Path, token: str) -> Starlette:
    """Return the application; all its addresses begin with the token."""
    routes = [
        Route("/", show_home),
        Route("/static/{name}", static),
        Route("/tables", upload_table, methods=["POST"]),
        Route("/tables/{name}", show_table),
        Route("/tables/{name}/advise", start_advice, methods=["POST"]),
        Route("/runs/{name}", show_run),
        Route("/runs/{name}/state", run_state),
        Route("/runs/{name}/delete", delete_run, methods=["POST"]),
        Route("/runs/{name}/rename", rename_run, methods=["POST"]),
        Route("/runs/{name}/predict", predict_file, methods=["POST"]),
        Route("/runs/{name}/join", add_client, methods=["POST"]),
        Route("/runs/{name}/predictions/{file}", download_predictions),
        Route("/runs/{name}/{what}", download),
    ]
    guards = [
        Middleware(TrustedHostMiddleware, allowed_hosts=ALLOWED_HOSTS, www_redirect=False),
        Middleware(TokenGuard, token=token),
    ]
    handlers: Any = {RequestError: show_refusal, HTTPException: show_http_error, Exception: show_http_error}
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)
    app.state.folder, app.state.jobs = folder, Jobs()
    app.state.jobs.start()
    return app


class TokenGuard:
    """Accepts requests whose address begins with the token, removes it, and sets the headers of every response."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        first, _, inner_path = scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            answer = PlainTextResponse("This address lacks its token; use the one that `mooring app` printed.", 403)
            return await answer(scope, receive, send)

        async def with_headers(message: HttpMessage) -> None:
            if message["type"] == "http.response.start":
                present = {key.lower() for key, _ in message["headers"]}
                missing = [
                    (k.lower().encode(), v.encode()) for k, v in HEADERS.items() if k.lower().encode() not in present
                ]
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        inner = {**scope, "path": f"/{inner_path}", "raw_path": f"/{inner_path}".encode()}
        return await self.app(inner, receive, with_headers)


async def show_refusal(request: Request, error: Exception) -> Response:
    """Return the error of a refused request, as a page or as JSON."""
    if request.method == "GET":
        return render_page("refused.html", "../" * (request.url.path.count("/") - 1), error=str(error), status=422)
    return JSONResponse({"error": str(error)}, 422)


async def show_home(request: Request) -> Response:
    folder = request.app.state.folder
    runs = sorted((folder / RUNS).glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    finished = [path.name for path in runs if (path / MODELS_FILE).is_file()]
    return render_page("home.html", "", finished=finished, endings=", ".join(ENDINGS), folder=folder)


async def static(request: Request) -> Response:
    kinds = {"app.js": "text/javascript", "app.css": "text/css"}
    name = request.path_params["name"]
    if name not in kinds:
        return PlainTextResponse("There is no such file.", 404)
    look = read_template("page.css") if name == "app.css" else ""  # the report's own, and a little more
    return Response(look + read_template(name, PACKAGE), media_type=kinds[name])


async def upload_table(request: Request) -> Response:
    return JSONResponse({"next": f"tables/{(await store_upload(request)).name}"})


async def store_upload(request: Request) -> Path:
    """Store an uploaded table under a new name, and return its path; what is no table is refused."""
    file_name = Path(request.query_params.get("name", "")).name
    path = free_name(request.app.state.folder / TABLES, re.sub(r"[^\w.-]+", "-", file_name).strip(".-") or "table.csv")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_TABLE_BYTES:
            raise RequestError(f"{file_name} has more than {MAX_TABLE_BYTES:,} bytes; use `mooring advise` for it.")
    await run_in_threadpool(write_atomically, path, bytes(data))
    try:
        await run_in_threadpool(read_source, path)
    except Exception:
        path.unlink()
        raise
    return path


def free_name(folder: Path, name: str, reserved: Container[str] = ()) -> Path:
    """Return a path in the folder that is neither used nor reserved: table.csv, table-2.csv, ..."""
    stem, dot, ending = name.partition(".")
    number, path = 1, folder / name
    while path.exists() or path.name in reserved:
        number += 1
        path = folder / f"{stem}-{number}{dot}{ending}"
    return path


async def show_table(request: Request) -> Response:
    """Show the columns, the chosen client and target, and findings of the data check."""
    path = find_entry(request, TABLES)
    return await run_in_threadpool(table_page, path, request.query_params)


def table_page(path: Path, query: QueryParams) -> Response:
    options = read_query(query)
    reading = {name: options[name] for name in ("client", *READING_OPTIONS) if name in options}
    table = read_source(path, LoadOptions.make(reading).reading())
    columns, rows = describe_columns(table.frame), len(table.frame)
    clients, names = guess_client_columns(columns, rows), [column.name for column in columns]
    options.setdefault("client", next(iter(clients), names[0]))
    options.setdefault("target", next(iter(guess_target_columns(columns, options["client"])), names[-1]))
    roles = options["client"], options["target"]
    if "chosen" in query:
        options["drop"] = [name for name in names if name not in (*query.getlist("use"), *roles)]
    findings = check(path, **load_arguments(options), drop_missing_target=True)
    cures = [[(cure.label, address_with(options, names, cure)) for cure in finding.cures] for finding in findings]
    by_severity = {
        severity: [pair for pair in zip(findings, cures) if pair[0].severity == severity] for severity in SEVERITIES
    }
    sizes = table.frame[roles[0]].value_counts() if roles[0] in table.frame else []
    return render_page(
        "table.html",
        "../",
        name=path.name,
        rows=rows,
        columns=columns,
        likely=clients,
        options=options,
        findings=by_severity,
        applied=[(cure.label, address_without(options, names, cure)) for cure in list_applied_cures(options)],
        hidden=[pair for pair in query_pairs(options, names) if pair[0] in CURE_OPTIONS and pair[0] != "drop_small"],
        small=(sum(size < SMALL_CLIENT_ROWS for size in sizes), len(sizes), SMALL_CLIENT_ROWS),
    )


def read_query(query: QueryParams) -> JsonObject:
    """Return the options of a table in an address; a wrong one is refused in a sentence."""
    options: JsonObject = {}
    for name, kind in OPTION_TYPES.items():
        texts = [text for text in query.getlist(name) if text]
        if texts and name != "drop":  # the columns that are used are listed instead: `use`
            options[name] = texts if kind is list else _parse_text(name, texts[-1])
    return check_types(options)


def _parse_text(name: str, text: str) -> object:
    kind = OPTION_TYPES[name]
    try:
        return text == "on" if kind is bool else kind(text)
    except ValueError:
        return text  # refused by `check_types`


def check_types(options: JsonObject) -> JsonObject:
    """Refuse options that are unknown or of a wrong type."""
    words = {str: "a text", list: "a list of texts", bool: "true or false", int: "a whole number from 1 on"}
    for name, value in options.items():
        kind = OPTION_TYPES.get(name)
        if kind is None:
            raise RequestError(f"unknown option {name[:40]!r}; known are {', '.join(OPTION_TYPES)}.")
        number = kind is float and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 0.5
        right = number if kind is float else isinstance(value, kind)
        if kind is list and right:
            right = all(isinstance(text, str) for text in value)
        if kind is int and right:
            right = not isinstance(value, bool) and value >= 1
        if not right:
            label = name.replace("_", " ")
            wanted = words.get(kind, "a share between 0 and 0.5")
            raise RequestError(f"{label} must be {wanted}, got {str(value)[:40]!r}.")
    return options


def load_arguments(options: JsonObject) -> JsonObject:
    """Return the options for `check` and `advise`: clients of any size, unless small ones are left out."""
    return options | {"min_rows": SMALL_CLIENT_ROWS if options.get("drop_small") else 1}


def list_applied_cures(options: JsonObject) -> list[Cure]:
    """Return the cures among the options; columns that are left out are shown as ticks instead."""
    out = []
    for name in CURE_OPTIONS:
        values = options.get(name) or []
        out += [Cure(name, value) for value in (values if isinstance(values, list) else [values])]
    return out


def query_pairs(options: JsonObject, names: list[str]) -> list[tuple[str, object]]:
    """Return the options as parts of an address."""
    pairs: list[tuple[str, object]] = []
    for name, value in options.items():
        if name != "drop":
            pairs += [
                (name, "on" if part is True else part) for part in (value if isinstance(value, list) else [value])
            ]
    used = [("use", name) for name in names if name not in options.get("drop", ())]
    return [*((name, part) for name, part in pairs if part is not False), ("chosen", "1"), *used]


def address_with(options: JsonObject, names: list[str], cure: Cure) -> str:
    """Return the address of the page with a cure applied."""
    old = options.get(cure.option, [])
    new = [*(value for value in old if value != cure.value), cure.value] if isinstance(old, list) else cure.value
    value = new if OPTION_TYPES[cure.option] is list else cure.value
    return "?" + urlencode(query_pairs(options | {cure.option: value}, names))


def address_without(options: JsonObject, names: list[str], cure: Cure) -> str:
    """Return the address of the page without a cure."""
    value = options[cure.option]
    remaining = [part for part in value if part != cure.value] if isinstance(value, list) else False
    return "?" + urlencode(query_pairs(options | {cure.option: remaining}, names))


async def parse_json(request: Request) -> JsonObject:
    """Return the JSON object of a request's body; RequestError for anything else."""
    try:
        content = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise RequestError("the request must be a JSON object.")
    return content


async def start_advice(request: Request) -> Response:
    path, options = find_entry(request, TABLES), check_types(await parse_json(request))
    missing = next((name for name in ("client", "target") if name not in options), None)
    if missing is not None:
        raise RequestError(f'the request lacks "{missing}", the name of a column.')
    folder, jobs = request.app.state.folder, request.app.state.jobs
    run = free_name(folder / RUNS, f"{path.name.partition('.')[0]}-advice", jobs.by_run)

    def work(job: Job) -> None:
        advise(str(path), **load_arguments(options), out=run, progress=job.report_progress)
        job.report_progress("writing the report", 1, 1)
        write_report([run])

    jobs.add(Job(run, work))
    return JSONResponse({"next": f"../runs/{run.name}"})


async def show_run(request: Request) -> Response:
    name, jobs = request.path_params["name"], request.app.state.jobs
    job = jobs.by_run.get(name)
    if job is not None and job.state != "done":
        return render_page("progress.html", "../", name=name, job=job)
    path = find_entry(request, RUNS)
    directory = open_run(path)
    shared = {"name": name, "files": list_predictions(request, name), "endings": ", ".join(ENDINGS)}
    if directory.run.mooring.purpose == "personalize":
        return render_page("joined.html", "../", summary=directory.summary, **shared)
    contents = await run_in_threadpool(collect_contents, path)
    has_intervals = await run_in_threadpool(lambda: stored_intervals(directory) is not None)
    return render_page("run.html", "../", run=contents, downloads=DOWNLOADS, has_intervals=has_intervals, **shared)


def list_predictions(request: Request, run: str) -> list[str]:
    """Return the names of the prediction files of a run, the newest first."""
    files = (request.app.state.folder / PREDICTIONS / run).glob("*")
    return [path.name for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)]


async def predict_file(request: Request) -> Response:
    """Predict the rows of an uploaded table with a run's models, and store them as a workbook or a CSV file."""
    run, query = find_entry(request, RUNS), request.query_params
    ending = query.get("format", "xlsx")
    if ending not in ("xlsx", "csv"):
        raise RequestError(f"predictions are written as xlsx or csv, got {ending[:40]!r}.")
    table = await store_upload(request)
    level = PREDICTION_LEVEL if query.get("interval") == "on" else None

    def write_predictions() -> tuple[Path, list[str]]:
        frame, notes = predict(run, table, interval=level)
        content = excel_bytes(frame) if ending == "xlsx" else csv_bytes(frame)
        folder = request.app.state.folder / PREDICTIONS / run.name
        folder.mkdir(parents=True, exist_ok=True)
        path = free_name(folder, f"{table.name.partition('.')[0]}-predictions.{ending}")
        write_atomically(path, content)
        return path, [f"{len(frame)} rows predicted.", *notes]

    path, notes = await run_in_threadpool(write_predictions)
    return JSONResponse({"file": f"{run.name}/predictions/{path.name}", "name": path.name, "notes": notes})


async def download_predictions(request: Request) -> Response:
    folder = request.app.state.folder / PREDICTIONS / find_entry(request, RUNS).name
    file = {path.name: path for path in folder.glob("*")}.get(request.path_params["file"])
    if file is None:
        return PlainTextResponse("There is no such file.", 404)
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


async def add_client(request: Request) -> Response:
    """Start a job that recommends a model for the clients of an uploaded table, and adds them to a copy of a run."""
    before, jobs = find_entry(request, RUNS), request.app.state.jobs
    table = await store_upload(request)
    run = free_name(request.app.state.folder / RUNS, f"{before.name}-joined", jobs.by_run)

    def work(job: Job) -> None:
        personalize(before, table, out=run, min_rows=1)

    jobs.add(Job(run, work))
    return JSONResponse({"next": f"../runs/{run.name}"})


async def delete_run(request: Request) -> Response:
    """Remove a finished run from the folder."""
    path = find_entry(request, RUNS)
    job = request.app.state.jobs.by_run.get(path.name)
    if job is not None and job.state in ("waiting", "running"):
        raise RequestError(f"run {path.name!r} is not finished yet; wait until it is.")
    await run_in_threadpool(shutil.rmtree, path)
    await run_in_threadpool(shutil.rmtree, request.app.state.folder / PREDICTIONS / path.name, ignore_errors=True)
    request.app.state.jobs.by_run.pop(path.name, None)
    return JSONResponse({"next": "../"})


async def rename_run(request: Request) -> Response:
    """Give a finished run another name."""
    path = find_entry(request, RUNS)
    name = (await parse_json(request)).get("name")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise RequestError("a run's name has at most 100 characters from a-z, A-Z, 0-9, dots and dashes.")
    jobs, new = request.app.state.jobs, path.with_name(name)
    if new.exists() or name in jobs.by_run:
        raise RequestError(f"there is a run called {name!r} already.")
    if not (path / MODELS_FILE).is_file():
        raise RequestError(f"run {path.name!r} is not finished yet; wait until it is.")
    path.rename(new)
    predictions = request.app.state.folder / PREDICTIONS / path.name
    if predictions.is_dir():
        predictions.rename(predictions.with_name(name))
    jobs.by_run.pop(path.name, None)
    return JSONResponse({"next": f"../runs/{name}"})


async def show_http_error(request: Request, error: Exception) -> Response:
    """Return the error of a wrong address or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    sentences = {404: "There is no such page.", 405: "This address does not take such a request."}
    text = sentences.get(status, f"The request failed: {type(error).__name__}: {error}")
    return PlainTextResponse(text, status) if request.method == "GET" else JSONResponse({"error": text}, status)


async def run_state(request: Request) -> Response:
    job = request.app.state.jobs.by_run.get(request.path_params["name"])
    if job is None:
        return JSONResponse({"error": "There is no such run."}, 404)
    return JSONResponse(job.to_json())


async def download(request: Request) -> Response:
    """Return a file of a finished run; the report is shown, other files are saved."""
    path, file = find_entry(request, RUNS), request.path_params["what"]
    if file == "report":
        page = path / REPORT_FILE
        report_headers = {"Content-Security-Policy": "frame-ancestors 'none'"}  # the report contains its own policy
        save_name = f"{path.name}.html" if "save" in request.query_params else None
        return FileResponse(page, media_type="text/html", headers=report_headers, filename=save_name)
    makers: dict[str, tuple[str, Callable[[Path], bytes]]] = {
        "models": (MODELS_FILE, lambda run: (run / MODELS_FILE).read_bytes()),
        "coefficients": ("coefficients.csv", lambda run: export(run, "csv")[0]),
        "clients": ("clients.csv", lambda run: csv_bytes(open_run(run).clients)),
        "run": ("run.zip", zip_run),
    }
    if file not in makers:
        return PlainTextResponse("There is no such file.", 404)
    name, make = makers[file]
    content = await run_in_threadpool(make, path)
    headers = {"Content-Disposition": f'attachment; filename="{path.name}-{name}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def zip_run(run: Path) -> bytes:
    """Return all files of a run as a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(run.rglob("*")):
            if path.is_file():
                archive.write(path, f"{run.name}/{path.relative_to(run)}")
    return buffer.getvalue()


def find_entry(request: Request, kind: str) -> Path:
    """Return the path of a table or a run in the folder; no other file can be reached."""
    folder, name = request.app.state.folder / kind, request.path_params["name"]
    entries = {path.name: path for path in folder.iterdir() if kind == TABLES or (path / RUN_FILE).is_file()}
    if name not in entries:
        raise RequestError(f"there is no {kind[:-1]} called {name!r} here.")
    return entries[name]


def render_page(file: str, root: str, /, *, status: int = 200, **context: object) -> HTMLResponse:
    """Return a page from its template; `root` is the relative address of the start page."""
    return HTMLResponse(get_environment(PACKAGE).get_template(file).render(root=root or "./", **context), status)
