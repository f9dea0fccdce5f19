"""Federations of real processes on loopback over TLS, keys, and what is refused before anything starts."""

import re
import shutil
import stat
from pathlib import Path

import pytest
import torch

from mooring.commands.federation import describe_test_loss
from mooring.core.errors import RequestError
from mooring.engines.fit import fit
from mooring.remote import keys
from mooring.remote import serve as federation
from mooring.remote.join import join as join_
from mooring.runs.directory import open_run
from tests.remote.federation_runs import ALGORITHMS, write_clients
from tests.remote.machines import DELAY_SECONDS, Machines, why_no_namespaces
from tests.remote.processes import (
    FORKS,
    LONG,
    Child,
    assert_models_are_the_simulators,
    commands_of,
    run_file,
    wait_until,
)

ROOT = Path(__file__).parents[2]

pytestmark = FORKS

NAMES = ["north", "south", "west"]
HOST, PORT = "fed.example.org", 9092  # as on the page


def read_page():
    """The run file of three machines, and the commands that are typed at the server and at the client `north`."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    _, init, serve, join, *_ = re.findall(r"^    (mooring .*)$", page, re.M)
    return re.search(r"```toml\n(.*?)```", page, re.S).group(1), init, serve, join


def give_files(folder, run):
    """Every machine's folder with the run file; each client's with its own table."""
    write_clients(folder / "clients", clients=3)
    (folder / "run.toml").write_text(run)
    for file, name in zip(sorted((folder / "clients").iterdir()), NAMES):
        file.rename(file.with_name(f"{name}.csv"))
        shutil.copy(folder / "clients" / f"{name}.csv", folder / name)
    for name in ("server", *NAMES):
        (folder / name / "run.toml").write_text(run)


def give_keys(folder):
    for name in NAMES:
        shutil.copy(folder / "server" / "keys" / "ca.crt", folder / name)
        shutil.copy(folder / "server" / "keys" / "clients" / name, folder / name)


def assert_each_machine_has_its_models(folder):
    here = fit(folder / "run.toml")
    saved = open_run(folder / "server" / "runs" / "three").models
    torch.testing.assert_close(saved.common, here.trained.common, rtol=1e-12, atol=1e-12)
    for name in NAMES:
        own = open_run(next((folder / name / "state").glob("*/result"))).models.personal[0]
        torch.testing.assert_close(own, here.models[name], rtol=1e-12, atol=1e-12)
        assert "A curious server sees" in (folder / f"{name}.log").read_text()
    assert commands_of(folder) == {}


@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces() or "network namespaces work here")
def test_the_page_on_deploying_works_as_typed_on_four_machines(tmp_path, monkeypatch):
    """Four network namespaces, each with its own folder; the clients' lines have a delay of 200 ms. Every command is
    that of the page, without a change, and so are the addresses of health and metrics."""
    run, init, serve, join = read_page()
    with Machines(tmp_path, ["server", *NAMES], HOST, PORT, DELAY_SECONDS) as network:
        machines, started = network.machines, {}
        give_files(tmp_path, run)
        try:
            assert machines["server"].start(init, tmp_path / "keys.log").wait(LONG) == 0
            give_keys(tmp_path)
            started = {"server": machines["server"].start(serve, tmp_path / "server.log")}
            started |= {
                name: machines[name].start(join.replace("north", name), tmp_path / f"{name}.log") for name in NAMES[:-1]
            }
            health = ["curl", "--silent", "--cacert", "ca.crt", f"https://{HOST}:{PORT}/healthz"]
            wait_until(lambda: "ok" in machines["north"].run(*health).stdout)
            wait_until(lambda: "not connected: west" in (tmp_path / "server.log").read_text())
            token = next((tmp_path / "server" / "runs").glob("*.federation/metrics.token")).read_text()
            metrics = ["curl", "--silent", "--cacert", "ca.crt", f"https://{HOST}:{PORT}/metrics"]
            assert "token" in machines["north"].run(*metrics).stdout
            metrics += ["--header", f"Authorization: Bearer {token.strip()}"]
            assert "mooring_connected_clients" in machines["north"].run(*metrics).stdout
            started["west"] = machines["west"].start(join.replace("north", "west"), tmp_path / "west.log")
            for who, process in started.items():
                assert process.wait(LONG) == 0, (tmp_path / f"{who}.log").read_text()
        finally:
            for process in started.values():
                process.kill()
                process.wait(60)
    monkeypatch.chdir(tmp_path)  # `source` is relative
    assert_each_machine_has_its_models(tmp_path)


@pytest.mark.skipif(not why_no_namespaces(), reason="the page is followed in network namespaces instead")
def test_the_page_on_deploying_works_as_typed(tmp_path, monkeypatch):
    """From nothing to a federation of three machines: each has a folder of its own, and all of them are this one."""
    run, init, serve, join = read_page()
    for name in ("server", *NAMES):
        (tmp_path / name).mkdir()
    give_files(tmp_path, run)
    port = federation.find_free_port()

    def command(line, who):
        words = line.replace(f"{HOST}:{PORT}", f"127.0.0.1:{port}").replace("0.0.0.0", "127.0.0.1").split()[1:]
        words += ["--port", str(port)] if who == "server" else []
        return Child(words, tmp_path / f"{who}.log", tmp_path / who)

    assert Child(init.split()[1:], tmp_path / "keys.log", tmp_path / "server").wait(60) == 0
    give_keys(tmp_path)
    started = {"server": command(serve, "server")}
    try:
        started |= {name: command(join.replace("north", name), name) for name in NAMES}
        for who, process in started.items():
            assert process.wait(LONG) == 0, (tmp_path / f"{who}.log").read_text()
    finally:
        for process in started.values():
            process.kill()
    monkeypatch.chdir(tmp_path)  # `source` is relative
    assert_each_machine_has_its_models(tmp_path)


def test_the_sentence_about_a_clients_test_loss():
    low, high = "improvement_over_local_ci_low", "improvement_over_local_ci_high"
    result = {"metric": "mse", "personal": 1.5, "local": 1.75, low: 0.1, high: 0.4}
    text = "Test mse of your personal model: 1.5; of your local model: 1.75."
    assert describe_test_loss(result) == f"{text} Difference, 95% CI: 0.1 to 0.4."
    assert describe_test_loss(result | {low: -0.1}).endswith("-0.1 to 0.4, which includes 0.")
    assert "too few test rows" in describe_test_loss(result | {low: None, high: None})
    assert describe_test_loss(result | {"local": None}) == "Test mse of your personal model: 1.5."


def test_keys_are_made_once_and_secret(tmp_path):
    made = keys.init(tmp_path / "keys", ["north", "south"], ["fed.example.org"])
    assert len(made) == 8 and keys.init(tmp_path / "keys", ["north"]) == []
    assert {path.name for path in keys.init(tmp_path / "keys", ["west"])} == {"west", "west.pub"}
    for name in ("ca.key", "server.key", "clients/north"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    assert set(keys.public_keys(tmp_path / "keys")) == {"north", "south", "west"}
    with pytest.raises(RequestError, match="usable as a file's name"):
        keys.init(tmp_path / "keys", ["../x"])


def test_unsafe_transport_is_refused_before_anything_starts(tmp_path):
    path, folder = run_file(tmp_path)

    def serve(match, **how):
        with pytest.raises(RequestError, match=match):
            federation.serve(path, tmp_path / "out", report=print, **{"clients": 2} | how)

    serve("needs TLS")
    serve("for this machine only", insecure=True, host="0.0.0.0")
    serve("not both", insecure=True, key_folder=tmp_path)
    serve("has no ca.crt", key_folder=tmp_path)
    serve("how many clients", insecure=True, clients=None)

    def join(match, data="site 0.csv", **how):
        with pytest.raises(RequestError, match=match):
            join_(path, folder / data, tmp_path / "state", report=print, **how)

    join("needs TLS")
    join("for this machine only", insecure=True, server="10.0.0.1:9092")
    join("site 9.csv: there is no such file", data="site 9.csv", insecure=True)
    assert not (tmp_path / "out.federation").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_larger_federations_over_tls(name, tmp_path):
    path, folder = run_file(tmp_path, name, rounds=20, clients=8)
    out = federation.run_local_federation(path, folder, tmp_path / "out", report=lambda sentence: None)
    assert_models_are_the_simulators(path, out, federation.server_folder(out))
