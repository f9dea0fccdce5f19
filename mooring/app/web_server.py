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
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mooring.advice.advise import advise
from mooring.app.jobs import Job, Jobs
from mooring.core.errors import RequestError
from mooring.data.data_checks import Finding, check
from mooring.data.file_readers import ENDINGS
from mooring.data.load_options import LoadOptions
from mooring.data.role_guesses import describe_columns, guess_client_columns, guess_target_columns
from mooring.data.table_sources import read_source
from mooring.engines.export import export
from mooring.report.html_report import get_environment, read_template, write_report
from mooring.report.report_contents import collect_contents
from mooring.runs.atomic_files import csv_bytes, write_atomically
from mooring.runs.directory import MODELS_FILE, REPORT_FILE, RUN_FILE, open_run

PACKAGE = "mooring.app"
LOOPBACK = "127.0.0.1"
ALLOWED_HOSTS = [LOOPBACK, "localhost"]
MAX_TABLE_BYTES = 2**31  # of a dropped table
SMALL_CLIENT_ROWS = 5  # clients with fewer rows are left out on request
TABLES, RUNS = "tables", "runs"  # the two folders of the page
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
    quiet: Any = {"log_level": "warning", "access_log": False}  # a log of requests would contain the token
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

        async def with_headers(message: Any) -> None:
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
    finished = [path.name for path in sorted((folder / RUNS).glob("*")) if (path / MODELS_FILE).is_file()]
    return render_page("home.html", "", finished=finished, endings=", ".join(ENDINGS), folder=folder)


async def static(request: Request) -> Response:
    kinds = {"app.js": "text/javascript", "app.css": "text/css"}
    name = request.path_params["name"]
    if name not in kinds:
        return PlainTextResponse("There is no such file.", 404)
    look = read_template("page.css") if name == "app.css" else ""  # the report's own, and a little more
    return Response(look + read_template(name, PACKAGE), media_type=kinds[name])


async def upload_table(request: Request) -> Response:
    """Store an uploaded table under a new name."""
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
    return JSONResponse({"next": f"tables/{path.name}"})


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


def table_page(path: Path, query: Any) -> Response:
    layout = read_layout(query)
    table = read_source(path, LoadOptions.make(layout).reading())
    columns, rows = describe_columns(table.frame), len(table.frame)
    clients = guess_client_columns(columns, rows)
    client = query.get("client") or next(iter(clients), columns[0].name)
    target = query.get("target") or next(iter(guess_target_columns(columns, client)), columns[-1].name)
    names = [column.name for column in columns]
    used_names = query.getlist("use") if "chosen" in query else names
    drop = [name for name in names if name not in used_names and name not in (client, target)]
    options = {
        "client": client,
        "target": target,
        "drop": drop,
        "drop_small": query.get("drop_small") == "on",
        **layout,
    }
    findings = check(path, **options, drop_missing_target=True, min_rows=fewest_rows(options["drop_small"]))
    return render_page(
        "table.html",
        "../",
        name=path.name,
        rows=rows,
        columns=columns,
        likely=clients,
        options=options,
        layout={"sheet": "", "header_row": ""} | layout,
        findings=[(finding, cure_address(finding, options, names)) for finding in findings],
        stopped=any(finding.severity == "error" for finding in findings),
    )


def fewest_rows(drop_small: bool) -> int:
    """Return the smallest number of rows of a client that takes part."""
    return SMALL_CLIENT_ROWS if drop_small else 1


def read_layout(query: Any) -> dict[str, Any]:
    """Return the sheet and the header row in a request."""
    sheet, row = query.get("sheet"), query.get("header_row")
    if row and not (str(row).isdigit() and int(row) >= 1):
        raise RequestError(f"the header row is a whole number from 1 on, got {str(row)[:40]!r}.")
    return ({"sheet": str(sheet)} if sheet else {}) | ({"header_row": int(row)} if row else {})


def cure_address(finding: Finding, options: dict[str, Any], names: list[str]) -> str | None:
    """Return the address of the page without the column of a finding; None if dropping it does not help."""
    column = finding.column
    if (
        finding.severity not in ("error", "warning")
        or column not in names
        or column in (options["client"], options["target"])
    ):
        return None
    remaining = [name for name in names if name not in (*options["drop"], column)]
    parameters = {key: value for key, value in options.items() if key not in ("drop", "drop_small")}
    small = {"drop_small": "on"} if options["drop_small"] else {}
    return "?" + urlencode({**parameters, **small, "chosen": "1", "use": remaining}, doseq=True)


async def parse_request(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body; RequestError for anything else."""
    try:
        content = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}.") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in ("client", "target")):
        raise RequestError('the request must be a JSON object with the texts "client" and "target".')
    drop = content.get("drop", [])
    if not isinstance(drop, list) or not all(isinstance(name, str) for name in drop):
        raise RequestError('"drop" must be a list of column names.')
    return content


async def start_advice(request: Request) -> Response:
    path, content = find_entry(request, TABLES), await parse_request(request)
    folder, jobs = request.app.state.folder, request.app.state.jobs
    run = free_name(folder / RUNS, f"{path.name.partition('.')[0]}-advice", jobs.by_run)
    options = {name: str(content[name]) for name in ("client", "target")} | read_layout(content)
    small = bool(content.get("drop_small"))
    options |= {"drop": content.get("drop") or None, "drop_small": small, "min_rows": fewest_rows(small)}

    def work(job: Job) -> None:
        advise(str(path), **options, out=run, progress=job.report_progress)
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
    contents = await run_in_threadpool(collect_contents, path)
    return render_page("run.html", "../", name=name, run=contents, downloads=DOWNLOADS)


async def delete_run(request: Request) -> Response:
    """Remove a finished run from the folder."""
    path = find_entry(request, RUNS)
    job = request.app.state.jobs.by_run.get(path.name)
    if job is not None and job.state in ("waiting", "running"):
        raise RequestError(f"run {path.name!r} is not finished yet; wait until it is.")
    await run_in_threadpool(shutil.rmtree, path)
    request.app.state.jobs.by_run.pop(path.name, None)
    return JSONResponse({"next": "../"})


async def rename_run(request: Request) -> Response:
    """Give a finished run another name."""
    path = find_entry(request, RUNS)
    try:
        name = (await request.json())["name"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise RequestError('the request must be a JSON object with the text "name".') from None
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise RequestError("a run's name has at most 100 characters from a-z, A-Z, 0-9, dots and dashes.")
    jobs, new = request.app.state.jobs, path.with_name(name)
    if new.exists() or name in jobs.by_run:
        raise RequestError(f"there is a run called {name!r} already.")
    if not (path / MODELS_FILE).is_file():
        raise RequestError(f"run {path.name!r} is not finished yet; wait until it is.")
    path.rename(new)
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


def render_page(file: str, root: str, /, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Return a page from its template; `root` is the relative address of the start page."""
    return HTMLResponse(get_environment(PACKAGE).get_template(file).render(root=root or "./", **context), status)
