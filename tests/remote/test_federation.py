"""A federation over messages: its models are the simulator's, and rows and personal models stay."""

import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import ttest_1samp

from mooring.algorithms.base import find
from mooring.core.errors import RequestError
from mooring.engines.fit import fit
from mooring.engines.predict import predict
from mooring.engines.prepare import FIXED_TERMS_NOTE
from mooring.estimates.client_summaries import LinearStats
from mooring.remote.client_node import ClientNode, run_digest
from mooring.remote.client_requests import RESULT_DIR
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload, pack, rebuild_tree, unpack
from mooring.remote.server_run import run_federation
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run
from mooring.runs.tensor_files import flatten
from tests.remote.federation_runs import (
    ALGORITHMS,
    HOW,
    ROUNDING,
    Killed,
    assert_same,
    make_clients,
    make_run,
    valid_settings,
    write_clients,
)


def algorithms_by_target():
    """Every algorithm on a regression; some, and all in the long trials, on a classification."""
    for name in ALGORITHMS:
        yield pytest.param(name, "regression", id=f"{name}-regression")
        if not name.startswith("kernel"):
            marks = () if name in ("fedavg", "apfl", "fedprox_personal") else pytest.mark.slow
            yield pytest.param(name, "binary", id=f"{name}-binary", marks=marks)


@pytest.mark.parametrize("name,kind", list(algorithms_by_target()))
def test_every_algorithm_equals_the_simulator(name, kind, tables, tmp_path):
    tables = tables[kind]
    fields, more = valid_settings(name), {} if find(name).full_participation else {"participation": 3}
    more["baselines"] = name == "fedavg"  # local models do not depend on the algorithm
    run = make_run(tables, name, fields, **more)
    apart = run_federation(run, MemoryTransport(make_clients(run, tables, tmp_path / "state")), tmp_path / "run")
    here = fit(tables, algorithm=name, settings=fields, **HOW, **more)
    if find(name).keeps_models:
        folders = [tmp_path / "state" / client / run_digest(run) / RESULT_DIR for client in here.models]
        own = [open_run(folder).models.personal for folder in folders]
        assert apart.trained.models is None and open_run(tmp_path / "run").models.personal is None
        used = replace(apart.trained.used, models=torch.cat(own))
        apart = replace(apart, trained=replace(apart.trained, last=used, best=used))
        here = replace(here, trained=replace(here.trained, last=here.trained.used, best=here.trained.used))
    assert_same(apart.trained, here.trained)
    ours, theirs = (result.job.clients.schema.model_dump(exclude={"digest"}) for result in (apart, here))
    assert ours == theirs
    if name == "fedavg":
        np.testing.assert_allclose(apart.clients["local"], here.clients["local"], rtol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_hyperparameters_are_resolved_from_replies(kind, tables, tmp_path):
    tables, lam = tables[kind], "aer"
    run = make_run(tables, "fedprox_personal", {"lam": lam})
    apart = run_federation(run, MemoryTransport(make_clients(run, tables, tmp_path / "state")), tmp_path / "run")
    assert_same(apart.trained, fit(tables, algorithm="fedprox_personal", settings={"lam": lam}, **HOW).trained)


QUICK = {("fedprox_personal", 9), ("apfl", 17), ("scaffold", 29)}  # the others are long trials


@pytest.mark.parametrize(
    "name,moment",
    [
        pytest.param(name, moment, marks=() if (name, moment) in QUICK else pytest.mark.slow)
        for name in ("fedprox_personal", "apfl", "scaffold")
        for moment in (2, 9, 13, 17, 23, 29, 31)
    ],
)
def test_a_killed_server_resumes_to_the_same_models(name, moment, tmp_path):
    """At any message, with clients that live for one message only; a new process finds what it needs on disk."""
    table = write_clients(tmp_path / "clients", clients=2)
    run = make_run(table, name)
    right = run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "a")), tmp_path / "whole")

    class Brief(dict):
        def __missing__(self, node):
            raise KeyError(node)

        def __getitem__(self, node):
            file = sorted(table.iterdir())[int(node) - 101]
            return ClientNode(run, file, tmp_path / "b" / file.stem)

    grid = MemoryTransport(make_clients(run, table, tmp_path / "b"))
    grid.clients = Brief(grid.clients)

    def fate(message, node, number):
        if number == moment:
            raise Killed
        return "fine"

    grid.fate = fate
    with pytest.raises(Killed):
        run_federation(run, grid, tmp_path / "cut")
    again = MemoryTransport([])
    again.clients = grid.clients
    found = run_federation(run, again, tmp_path / "cut")
    for which in ("last", "best"):
        one, other = getattr(found.trained, which), getattr(right.trained, which)
        assert torch.equal(one.common, other.common) and torch.equal(one.models, other.models)


def test_rows_that_changed_are_refused_when_a_run_resumes(table, tmp_path):
    run = make_run(table)
    run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run")
    file = sorted(table.iterdir())[0]
    file.write_text("\n".join(file.read_text().split("\n")[:-3]) + "\n")
    with pytest.raises(RequestError, match=r"site 0.csv has changed since the run began"):
        run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run")
    with pytest.raises(RequestError, match="is another run than the run file's"):
        other = make_run(table, "ditto")
        run_federation(other, MemoryTransport(make_clients(other, table, tmp_path / "state")), tmp_path / "run")


def test_personal_models_stay_with_their_clients_unless_shared(table, tmp_path):
    """The server's directory has none; each client's own predicts as the simulator's does."""
    run = make_run(table, federation={"share_models": False})
    result = run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run")
    assert open_run(tmp_path / "run").models.personal is None and result.trained.used.alpha is None
    here = fit(table, **HOW, out=tmp_path / "here")
    rows = pd.read_csv(sorted(table.iterdir())[1])
    right, _ = predict(here.run, rows.assign(client="site 1"))
    found, _ = predict(tmp_path / "state" / "site 1" / run_digest(run) / RESULT_DIR, rows.assign(client="site 1"))
    np.testing.assert_allclose(found["y"], right["y"], rtol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_each_client_gets_its_own_improvement(kind, tables, tmp_path):
    """By its own test rows: the simulator's models, and the paired interval of a textbook."""
    folder = tables[kind]
    run = make_run(folder, rounds=2, checkpoint="last", federation={"share_models": False})
    everybody = make_clients(run, folder, tmp_path / "state")
    run_federation(run, MemoryTransport(everybody), tmp_path / "run")
    here = fit(folder, algorithm="fedprox_personal", **HOW | {"rounds": 2, "checkpoint": "last"})
    alone = fit(folder, algorithm="local", **HOW | {"rounds": 2, "checkpoint": "last"})
    unit = here.job.clients.target_scale**here.job.task.unit_power
    for k, home in enumerate(everybody):
        stored = read_json(home.folder / "done.json")
        batch = here.job.clients.test.select(torch.tensor([k])).padded()
        own, other = (result.job.task.row_risk(result.models[home.name][None], batch)[0] for result in (here, alone))
        right = ttest_1samp(unit * (other - own).numpy(), 0.0)
        interval = right.confidence_interval(0.95)
        ends = [stored[f"improvement_over_local_ci_{end}"] for end in ("low", "high")]
        np.testing.assert_allclose(ends, [interval.low, interval.high], rtol=1e-6)
        np.testing.assert_allclose(stored["improvement_over_local"], float(unit * (other - own).mean()), rtol=1e-6)
        assert (ends[0] <= 0 <= ends[1]) == (right.pvalue > 0.05)


class SizesGrid(MemoryTransport):
    """Collects the sizes of models: in the server's state of each message, and in each message of a local update."""

    def __init__(self, homes):
        super().__init__(homes)
        self.down, self.up = [], []

    def push(self, pushed):
        pushed = list(pushed)
        for _, content in pushed:
            fields, tensors = unpack(content)
            if fields.get("label") == "local":
                continue  # the baseline has no personal part
            self.down += [part.numel() for name, part in tensors.items() if name == "server/w"]
        return super().push(pushed)

    def pull(self, numbers):
        found = super().pull(numbers)
        for content in found.values():
            tensors = unpack(content).tensors
            self.up += [part.numel() for name, part in tensors.items() if name.startswith("message") and part.numel()]
        return found


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "ditto"])
def test_personal_coefficients_are_not_sent(name, table, tmp_path):
    """The intercept is personal: messages of rounds have the other coefficients, in both directions."""
    fields = {"personal": "head", "batch": 4, "epochs": 1}
    run = make_run(table, name, fields, rounds=2, federation={"share_models": False})
    grid = SizesGrid(make_clients(run, table, tmp_path / "state"))
    apart = run_federation(run, grid, tmp_path / "run")
    here = fit(table, algorithm=name, settings=fields, **HOW | {"rounds": 2})
    torch.testing.assert_close(apart.trained.common, here.trained.common, rtol=ROUNDING, atol=ROUNDING)
    np.testing.assert_allclose(apart.clients["personal"], here.clients["personal"], rtol=1e-9)
    assert set(grid.up) == set(grid.down) == {here.job.task.dim - 1}


def test_a_formula_makes_the_simulators_columns(table, tmp_path):
    formula = "y ~ a * colour + I(b**2) + (1 + a | client)"
    run = make_run(table, rounds=2, formula=formula)
    clients = make_clients(run, table, tmp_path / "state")
    apart = run_federation(run, MemoryTransport(clients), tmp_path / "run")
    here = fit(table, algorithm="fedprox_personal", **HOW | {"rounds": 2}, formula=formula)
    assert_same(apart.trained, here.trained)
    ours, theirs = (result.job.clients.schema.model_dump(exclude={"digest"}) for result in (apart, here))
    fills = [schema["formula"].pop("fills") for schema in (ours, theirs)]
    assert ours == theirs and ours["formula"]["varying"] == ("Intercept", "a")
    assert fills[0] == {name: pytest.approx(fill) for name, fill in fills[1].items()}
    assert FIXED_TERMS_NOTE in apart.job.clients.notes and FIXED_TERMS_NOTE in here.job.clients.notes
    other = clients[0].answer("adopt", Payload({"run": clients[0].digest, "schema": {"formula": None}, "fresh": True}))
    assert "another formula" in other.fields["refused"]


def test_pooled_algorithms_are_refused(table, tmp_path):
    run = make_run(table, "pooled")
    with pytest.raises(RequestError, match="needs all rows in one place"):
        run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run")


def test_messages_are_counted_before_they_are_parsed():
    """A million fields, and as many tensors, cost no more than reading them."""
    for content in (
        b'{"fields":{' + b",".join(b'"%d":0' % k for k in range(1_000_000)) + b'},"order":[]}\n' + bytes(8),
        b'{"fields":{},"order":[]}\n' + (10**7).to_bytes(8, "little") + b"{" * 10**7,
    ):
        begun = time.process_time()
        with pytest.raises(RequestError, match="more than 1000 fields"):
            unpack(content, 1_000)
        assert time.process_time() - begun < 0.1


@pytest.mark.parametrize(
    "content", [b"", b"x", b"{}\n", b"[]\n", b'{"fields":[],"order":[]}\n' + bytes(8), b"[" * 10_000 + b"\n" + bytes(8)]
)
def test_malformed_messages_are_refused(content):
    with pytest.raises(RequestError, match="a message cannot be read"):
        unpack(content)


def test_payloads_survive_packing():
    rng = torch.Generator().manual_seed(0)
    state = LinearStats(
        torch.tensor([3.0]), torch.rand(1, 2, 2, generator=rng), None, torch.tensor([[True, False], [False, True]])
    )
    words = {"a": 0.1 + 0.2, "b": [1, None, "é"], "c": {"d": float("nan")}}
    found = unpack(pack(Payload(words, flatten("x", state) | {"deep": torch.zeros(0, 3, dtype=torch.int64)})))
    assert repr(found.fields) == repr(words)
    twin = rebuild_tree("x", found.tensors)
    assert twin._fields == state._fields and twin.moment is None
    assert all(torch.equal(one, other) for one, other in zip(twin, state) if other is not None)
    assert found.tensors["deep"].shape == (0, 3) and found.tensors["deep"].dtype == torch.int64


class RecordingGrid(MemoryTransport):
    """A grid that keeps the words of all replies."""

    def __init__(self, homes):
        super().__init__(homes)
        self.heard = []

    def pull(self, numbers):
        found = super().pull(numbers)
        self.heard += [repr(unpack(content).fields) for content in found.values()]
        return found


def test_rare_levels_are_not_named_and_the_schema_is_the_pooled_one(table, tmp_path):
    """ "ochre" is rare everywhere and in all, "mauve" at each client and not in all, "teal" at one client only."""
    for i, file in enumerate(sorted(table.iterdir())):
        frame = pd.read_csv(file)
        frame.loc[:1, "colour"] = "mauve"
        frame.loc[13 : 15 if i == 0 else 12, "colour"] = "ochre"
        frame.loc[3 : 4 if i else 12, "colour"] = "teal"
        frame.to_csv(file, index=False)
    run = make_run(table, rounds=1, min_category_rows=4)
    grid = RecordingGrid(make_clients(run, table, tmp_path / "state"))
    apart = run_federation(run, grid, tmp_path / "run")
    here = fit(table, algorithm="fedprox_personal", **HOW | {"rounds": 1, "min_category_rows": 4})
    ours, theirs = (result.job.clients.schema.model_dump(exclude={"digest"}) for result in (apart, here))
    assert ours == theirs
    colour = next(column for column in here.job.clients.schema.columns if column.name == "colour")
    assert colour.other and {"mauve", "teal"} <= set(colour.levels) and "ochre" not in colour.levels
    assert not any("ochre" in words for words in grid.heard) and any("mauve" in words for words in grid.heard)


def test_a_plan_reads_neither_dropped_columns_nor_numbers_as_names(table, tmp_path):
    """A server that asks for more than it agreed on: a dropped column, and the values of a column of numbers."""
    run = make_run(table, "fedavg", drop=["colour"])
    node = make_clients(run, table, tmp_path)[0]
    survey = node.answer("survey", Payload({"what": "survey", "run": node.digest}))
    assert "refused" not in survey.fields
    plan = {"target": node.member.roles.target, "client": None, "kind": "regression"}
    for column, kind, why in (("colour", "category", "does not learn from"), ("a", "category", "column of numbers")):
        asked = plan | {"columns": [{"name": column, "kind": kind, "source": "", "part": ""}]}
        reply = node.answer("tally", Payload({"what": "tally", "run": node.digest, "plan": asked}))
        assert why in reply.fields["refused"]
