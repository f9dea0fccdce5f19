"""Answers of the SuperLink that never reach the server's app; for those to clients see
`test_flower_unauthorized.py`."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

from flwr.superlink.grid.http_grid import HttpGrid

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
