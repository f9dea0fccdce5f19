"""Advice over real processes and TLS: what `mooring federation up` leaves is what `mooring advise` says."""

import pytest
import torch

from mooring.advice.advise import advise
from mooring.engines.request import read_federation_request
from mooring.remote.client_node import run_digest
from mooring.remote.client_requests import DONE_FILE, RESULT_DIR
from mooring.remote.serve import server_folder
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run
from tests.advice.test_remote_server import CLOSE, NEWTON_CLOSE, WORDS, write_case
from tests.remote.processes import LONG, Command


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bent", "heart", "parkinsons"])
def test_a_federation_of_processes_is_advised_as_the_simulator_is(name, tmp_path):
    path, out = write_case(name, tmp_path), tmp_path / "run"
    words = ["federation", "up", path, "--client-dir", tmp_path / "clients", "--out", out]
    command = Command(words, tmp_path / "log")
    assert command.wait(3 * LONG) == 0, (tmp_path / "log").read_text()
    here = advise(path)
    record, saved = open_run(out).advice, open_run(out).models
    assert (out / "report.html").exists()
    assert record["headline"] == here.headline and record["words"] == here.words and saved.personal is None
    close = NEWTON_CLOSE if name == "heart" else CLOSE
    torch.testing.assert_close(saved.common, here.models.global_, rtol=close, atol=close)
    rows = {row["client"]: row for row in record["clients"]}
    for i, row in here.clients.iterrows():
        folder = server_folder(out) / "clients" / row["client"] / run_digest(read_federation_request(path))
        assert all(rows[row["client"]][column] == row[column] for column in WORDS)
        assert all(read_json(folder / DONE_FILE)[column] == row[column] for column in WORDS)
        own = open_run(folder / RESULT_DIR).models.personal[0]
        torch.testing.assert_close(own, here.models.recommended[i], rtol=close, atol=close)
