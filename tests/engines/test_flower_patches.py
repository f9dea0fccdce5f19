"""Answers of the SuperLink that never reach the server's app; for those to clients see
`test_flower_unauthorized.py`."""

import ast
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

from flwr.superlink.grid.http_grid import HttpGrid

from mooring.core.errors import RequestError
from mooring.engines.flower import flower_patches
from mooring.engines.flower.flower_patches import LossDetectingGrid


class Deaf(BaseHTTPRequestHandler):
    """Hears every request, and gives no answer to the first."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.heard += 1
        if self.server.heard == 1:
            self.close_connection = True
            return
        self.send_response(200)  # with an empty list of messages, which is no bytes at all
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words):
        pass


def test_a_lost_answer_to_flowers_grid_is_noticed():
    server = HTTPServer(("127.0.0.1", 0), Deaf)
    server.heard = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    inner = HttpGrid(f"127.0.0.1:{server.server_port}", insecure=True, token="token")
    inner._run = SimpleNamespace(run_id=1)
    grid = LossDetectingGrid(inner)
    try:
        assert grid.pull_messages(["one"]) == []
        assert grid.lost and server.heard == 2
        assert grid.pull_messages(["one"]) == []
        assert not grid.lost and server.heard == 3
    finally:
        grid.close()
        server.shutdown()
        server.server_close()


PUBLIC_MODULES = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
PACKAGE = Path(flower_patches.__file__).parents[2]


def flower_imports(path):
    """Names that a module imports from Flower when it runs, as module:name."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def test_other_modules_use_the_public_interface_of_flower():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "flower_patches.py":
            private = {name for name in flower_imports(path) if name.split(":")[0] not in PUBLIC_MODULES}
            assert not private, f"{path.name} imports {sorted(private)}; put it into flower_patches.py"


def test_the_private_names_in_use_are_listed_and_there():
    """The list is what `check_flower` looks for in another version of Flower; nothing in it is out of use."""
    imported = {name for name in flower_imports(Path(flower_patches.__file__)) if name.split(":")[0] != "flwr.app"}
    listed = set(flower_patches.PRIVATE_NAMES)
    assert imported <= listed, f"not listed: {sorted(imported - listed)}"
    source = Path(flower_patches.__file__).read_text()
    body = source[source.index("class ConnectionLostError") :]
    unused = [name for name in listed - imported if name.rpartition(":")[2] not in body]
    assert not unused, f"no longer used: {unused}"
    assert flower_patches.missing_names() == []


def test_a_version_of_flower_that_lacks_a_name_is_refused(monkeypatch):
    flower_patches.check_flower()
    monkeypatch.setattr(flower_patches, "PRIVATE_NAMES", (*flower_patches.PRIVATE_NAMES, "flwr.supercore.run:gone"))
    with pytest.raises(RequestError, match=r"lacks flwr\.supercore.run:gone"):
        flower_patches.check_flower()
