"""What a server, a member or members together can reconstruct of a client: each attack succeeds with the defence off,
and recovers no row, no cell and no single message with it on."""

import base64
import json

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

from mooring.advice.federated.client import AdviceClientNode
from mooring.advice.federated.estimate import MOMENTS, NOISE, SPREAD, estimate_program
from mooring.advice.federated.plan import nonlinear_budget, plan_budget
from mooring.advice.federated.program import home_rows, shape_of
from mooring.advice.federated.score_models import HomeRows
from mooring.core.errors import RequestError, WorkError
from mooring.core.summing import run_together, to_integers
from mooring.data.level_sums import BUCKETS, hash_text
from mooring.data.schema_sums import LEVELS
from mooring.data.schema_sums import NAMES as LEVEL_NAMES
from mooring.remote import transcript
from mooring.remote.transcript import TAG_WORDS, MaskedAnswers, remove_tag
from mooring.runs.atomic_files import read_json
from tests.advice.test_federated_advice import plant
from tests.remote.masked_runs import NAMES, Watched, clock, identities, make_nodes, run, write_run, write_tables
from tests.remote.test_transcript import is_noise

__all__ = ["clock"]  # a fixture


@pytest.fixture
def parts(monkeypatch):
    """What every client adds up, before masks: by client and step."""
    seen, answer = {}, MaskedAnswers.answer

    def watched(self, number, part, total):
        seen[self.name, number] = part.step.name, to_integers(part)
        return answer(self, number, part, total)

    monkeypatch.setattr(MaskedAnswers, "answer", watched)
    return seen


def start(folder, data="", seen=None, **tables):
    """A federation that is advised: its nodes, and the transport with all that was sent."""
    files = write_tables(folder, **tables)
    federation = write_run(files, data)
    nodes = make_nodes(federation, files, folder / "state")
    _, transport = run(federation, nodes, folder / "run")
    return nodes, transport


def steps_of(parts, name):
    return [step for (who, _), (step, _) in sorted(parts.items(), key=lambda item: item[0][1]) if who == name]


# (a) A server that follows the protocol: rows by differences of sums.


def rows_by_differences(matrices):
    """Rows that the difference of two second-moment matrices shows: where it has rank one, its vector, whose scale the
    intercept in the last place gives."""
    first, second = np.triu_indices(len(matrices), 1)
    matrices = np.array(matrices)
    values, vectors = np.linalg.eigh(matrices[first] - matrices[second])
    size = np.abs(values)
    largest, order = size.max(1), np.sort(size, 1)
    vector = np.take_along_axis(vectors, size.argmax(1)[:, None, None], 2)[:, :, 0]
    is_row = (largest > 1e-6) & (order[:, -2] < 1e-5 * largest) & (np.abs(vector[:, -1]) > 1e-9)
    return vector[is_row] / vector[is_row][:, -1:]


def count_recovered(found, rows, close=1e-3):
    return sum(bool(len(found)) and np.abs(found - row).max(1).min() < close for row in rows)


def square(numbers, order):
    out = np.zeros((order, order))
    out[np.triu_indices(order)] = numbers
    return out + np.triu(out, 1).T


def matrices_of(totals, order):
    """All that may be a symmetric matrix of this order in totals of up to 60 numbers, at any place in them."""
    size, out = order * (order + 1) // 2, []
    for total in totals:
        values = remove_tag(total)[:-1].view(np.int64) * 1e-8
        if len(values) <= 60:
            out += [square(values[k : k + size], order) for k in range(len(values) - size + 1)]
    return out


@pytest.mark.parametrize("classes", [False, True], ids=["linear", "two classes"])
@pytest.mark.parametrize("sizes", [(12, 12, 12, 12, 12), (12, 20, 30, 40, 50)])
def test_rows_by_differences_of_sums(classes, sizes, tmp_path, clock):
    """Defence off: sums over all rows and over all without a fold of one row. On: all totals of a run, and each of the
    numbers in them as the beginning of a matrix. Matrices of columns are of order 3, with the target of order 4."""
    nodes, transport = start(tmp_path, sizes=sizes, classes=classes)
    rows = [home_rows(node.task, node.clients).jacobian[:, 0] for node in nodes]
    weight = 0.2 if classes else 1.0
    for own in rows:
        grams = [weight * own.T @ own] + [weight * (own.T @ own - np.outer(x, x)) for x in own]
        assert count_recovered(rows_by_differences(grams), own) == len(own)
    totals = transport.totals()
    for order in (3, 4):
        assert len(matrices_of(totals, order)) > 20
        found = rows_by_differences(matrices_of(totals, order))[:, -3:]
        assert count_recovered(found, np.concatenate(rows)) == 0


# (a) Each client's moments from sums over all clients, by least squares.


def test_matrices_summed_over_clients_show_each_client_and_are_not_sent(tmp_path, clock, parts):
    """Defence off: sums of (K_i^-1 + T)^-1 at ten T, as by restricted likelihood from sums. On: no step that is not
    linear in rows has as many numbers as a matrix in each of two occurrences."""
    rng = np.random.default_rng(3)
    grams = [rng.normal(size=(12 + 9 * k, 2)) for k in range(3)]
    grams = [x.T @ x for x in grams]
    scales = [np.diag(t) for t in rng.uniform(0.003, 0.3, size=(10, 2))]
    lower = np.tril_indices(2)

    def forward(theta):
        out = np.zeros((10, 2, 2))
        for part in theta.reshape(3, 3):
            root = np.zeros((2, 2))
            root[lower] = part
            for k, t in enumerate(scales):
                gram = root @ root.T
                out[k] += np.linalg.solve(np.eye(2) + gram @ t, gram)
        return out.reshape(-1)

    truth = np.concatenate([np.linalg.cholesky(gram)[lower] for gram in grams])
    total = forward(truth)
    best = min(
        (least_squares(lambda v: forward(v) - total, rng.normal(size=9) * 5, xtol=1e-15, ftol=1e-15) for _ in range(8)),
        key=lambda fit: fit.cost,
    )
    found = []
    for part in best.x.reshape(3, 3):
        root = np.zeros((2, 2))
        root[lower] = part
        found.append(root @ root.T)
    for gram in grams:
        assert min(np.abs(one - gram).max() / np.abs(gram).max() for one in found) < 1e-3
    nodes, _ = start(tmp_path)
    coefficients = 3 + nodes[0].running.result[0].federation.extra  # with those of splines
    counted = sum(len(values) - 1 for (who, _), (step, values) in parts.items() if who == "ann" and step in NONLINEAR)
    assert counted <= max(nonlinear_budget(5, coefficients), 6)


NONLINEAR = {"noise", "spread", "variance", "candidates", "differences", "results"}


@pytest.mark.slow
def test_moments_of_clients_by_least_squares_over_all_totals():
    """Of six clients with five coefficients, the moments given the pooled ones are 105 numbers; a run counts 24. From
    random clients with these pooled moments, Levenberg and Marquardt's steps fit what was sent to 1 % of the first
    misfit, and end further from the truth (1.47 times) than the guess that all clients are alike."""
    clients, order = 6, 5
    task, homes, _ = plant("linear", clients, 40, 0.4, 7)
    shape, sent = shape_of(task), []

    def watch(program):
        part = next(program)
        while True:
            total = yield part
            sent.append((part.step, total))
            try:
                part = program.send(total)
            except StopIteration as end:
                return end.value

    programs = [estimate_program(shape, [home], plan_budget) for home in homes]
    run_together([watch(programs[0]), *programs[1:]])
    names = [step.name for step, _ in sent]
    assert NOISE.name in names and SPREAD.name in names
    truth = np.array([moments_of(home) for home in homes])
    pooled = truth.sum(0)

    def forward_one(vector, rows=40):
        """What a client with these moments would send of the counted steps; rows of zeros change no moment."""
        values, vectors = np.linalg.eigh(square(vector, order + 1))
        half = (vectors * np.sqrt(np.maximum(values, 1e-3))).T
        full = np.concatenate([half, np.zeros((rows - order - 1, order + 1))])
        home = HomeRows(full[:, None, :order], full[:, order], homes[0].family, ())
        program, out = estimate_program(shape, [home], plan_budget), []
        part = next(program)
        for step, total in sent:
            if step.name in (NOISE.name, SPREAD.name):
                out.append(np.atleast_2d(part.values)[0])
            if step.name == SPREAD.name:
                return np.concatenate(out)
            part = program.send(total)

    target = np.concatenate([total for step, total in sent if step.name in (NOISE.name, SPREAD.name)])
    guess, size = np.tile(pooled / clients, (clients, 1)), truth.shape[1]
    unit, scale = np.abs(target) + 1.0, np.abs(truth).mean(0) / 4  # of numbers sent, and of moments

    def misfit(found):
        try:
            return (target - sum(map(forward_one, found))) / unit
        except np.linalg.LinAlgError:  # moments that no rows have
            return np.full(len(target), np.inf)

    def slopes(found):
        """[numbers, moments]: the last client has what the pooled moments leave."""
        out = np.zeros((clients, size, len(target)))
        for i in range(clients):
            base = forward_one(found[i])
            for k in range(size):
                moved = found[i].copy()
                moved[k] += 1e-4 * scale[k]
                out[i, k] = (forward_one(moved) - base) / 1e-4
        return ((out[:-1] - out[-1]).reshape(-1, len(target)) / unit).T

    rng, root = np.random.default_rng(0), np.linalg.cholesky(square(pooled, order + 1) / (40 * clients))
    draws = [root @ rng.normal(size=(order + 1, 40)) for _ in range(clients)]  # all alike is a saddle
    found = np.array([(z @ z.T)[np.triu_indices(order + 1)] for z in draws])
    found += (pooled - found.sum(0)) / clients
    damping, start_misfit = 1e-2, np.linalg.norm(misfit(found))
    for _ in range(16):
        jacobian, error = slopes(found), misfit(found)
        for _ in range(8):
            inner = jacobian @ jacobian.T
            inner += damping * np.trace(inner) / len(inner) * np.eye(len(inner))
            step = (jacobian.T @ np.linalg.lstsq(inner, error, rcond=None)[0]).reshape(clients - 1, size) * scale
            trial = found.copy()
            trial[:-1] += step
            trial[-1] = pooled - trial[:-1].sum(0)
            if np.linalg.norm(misfit(trial)) < np.linalg.norm(error):
                found, damping = trial, damping / 10
                break
            damping *= 10
    assert np.linalg.norm(misfit(found)) < 0.1 * start_misfit  # the attack fits what was sent
    known, blind = (np.linalg.norm((one - truth) / scale) for one in (found, guess))
    assert len(target) <= 0.25 * (clients - 1) * size
    assert known > 0.9 * blind


def moments_of(home):
    z = np.column_stack([home.jacobian[:, 0], home.y])
    return (z.T @ z)[np.triu_indices(z.shape[1])]


# (a) Dummies: whole numbers.


def test_counts_of_yes_and_no_leave_a_client_undetermined():
    """Defence off: one client's own counts give the cross table of its two yes/no columns, and so all its rows. On: the
    counts of five clients agree with hundreds of cross tables of the first."""
    rng = np.random.default_rng(0)
    clients = [rng.integers(0, 2, size=(12, 2)) for _ in range(5)]
    own = clients[0]
    both, first, second = (own[:, 0] * own[:, 1]).sum(), own[:, 0].sum(), own[:, 1].sum()
    cells = [both, first - both, second - both, 12 - first - second + both]
    rebuilt = np.repeat([[1, 1], [1, 0], [0, 1], [0, 0]], cells, axis=0)
    assert sorted(map(tuple, rebuilt)) == sorted(map(tuple, own))
    pooled = np.unique(np.concatenate(clients), axis=0, return_counts=True)[1]
    tables = np.indices([13] * 3).reshape(3, -1).T
    tables = np.column_stack([tables, 12 - tables.sum(1)])
    assert ((tables >= 0) & (tables <= pooled)).all(1).sum() > 200


# (b), (e) Levels: names of rare ones, and dictionaries.


def write_categories(folder, rare="canary-47f1", dropped="secret"):
    """Tables with a category, one level of which one client has in one row, and a column that is dropped."""
    files = write_tables(folder, sizes=(40,) * 5)
    rng = np.random.default_rng(1)
    for k, path in enumerate(sorted(files.iterdir())):
        frame = pd.read_csv(path)
        frame["kind"] = rng.choice(["red", "green", "blue"], len(frame))
        if k == 2:
            frame.loc[7, "kind"] = rare
        frame.insert(0, "patient", [f"{dropped}-{k}-{j}" for j in range(len(frame))])
        frame.to_csv(path, index=False)
    return files


def run_categories(folder, ask=None, **more):
    files = write_categories(folder, **more)
    federation = write_run(files, 'drop = ["patient"]')
    nodes = make_nodes(federation, files, folder / "state")
    transport, error = Watched(nodes, ask=ask), None
    try:
        run(federation, nodes, folder / "run", transport=transport)
    except (RequestError, WorkError) as raised:
        error = raised
    return nodes, transport, error


def forge_levels(parts):
    """A server that changes the total of levels for all clients alike: each level would have 10 rows at 3 clients."""

    def ask(name, request):
        number = request.fields.get("number", 0)
        if request.fields["what"] != "step" or not number or parts[NAMES[0], number - 1][0] != LEVELS.name:
            return request
        total = request.tensors["total"].clone()
        table = total[-TAG_WORDS - 1 - 3 * BUCKETS : -TAG_WORDS - 1].view(BUCKETS, 3)
        for bucket in table[:, 1].nonzero().reshape(-1).tolist():
            clients = int(table[bucket, 1])
            table[bucket, 0], table[bucket, 1] = 30, 3
            table[bucket, 2] = table[bucket, 2] // clients * 3
        return request._replace(tensors={"total": total})

    return ask


def texts_in(sums, clients=1):
    """Names of levels in sums of their bytes over clients."""
    shared = [numbers.view(np.int64) // clients for numbers in sums]
    return b" ".join(bytes(int(value) if 0 < value < 256 else 32 for value in numbers) for numbers in shared)


@pytest.mark.parametrize("defended", [False, True])
def test_a_total_changed_for_all_alike_does_not_name_a_rare_level(defended, tmp_path, clock, parts, monkeypatch):
    if not defended:
        monkeypatch.setattr(MaskedAnswers, "check_total", lambda self, total: remove_tag(total))
    _, _, error = run_categories(tmp_path, forge_levels(parts))
    by_step = {}
    for (_, number), (step, values) in parts.items():
        by_step.setdefault((number, step), []).append(values)
    sums = [
        np.sum(values, axis=0, dtype=np.uint64) for (_, step), values in by_step.items() if step == LEVEL_NAMES.name
    ]
    assert (b"canary-47f1" in texts_in(sums)) == (not defended)
    if defended:
        assert "5 of 5 clients refuse: a total is not the sum" in str(error)


def test_levels_of_one_client_are_named_to_nobody_and_found_by_members_with_a_dictionary(tmp_path, clock, parts):
    """The server counts levels by buckets of a hash whose secret it does not have: no word of a dictionary has its code
    there. A member has the secret. From the totals, which every member gets, it learns of a word that it guesses in how
    many rows it is, and of how many clients; not of which."""
    nodes, transport, error = run_categories(tmp_path)
    assert error is None
    sums = {}
    for (_, _), (step, values) in parts.items():
        sums[step] = sums.get(step, 0) + values
    assert b"canary" not in texts_in([sums[LEVEL_NAMES.name]]) and b"red" in texts_in([sums[LEVEL_NAMES.name]], 5)
    schema = nodes[0].schema
    assert all("canary" not in name for node in nodes for name in [*node.schema.features, json.dumps(str(node.schema))])
    assert schema == nodes[3].schema
    table = sums[LEVELS.name][-1 - 3 * BUCKETS : -1].view(np.int64).reshape(BUCKETS, 3)
    secrets = {read_json(node.sums / "secret.json")["secret"] for node in nodes}
    assert len(secrets) == 1 and not any(secret in str(sent) for secret in secrets for *_, sent in transport.sent)

    def look_up(secret, word):
        bucket, code = hash_text(secret, 0, "kind", word)
        rows, clients, codes = table[bucket].tolist()
        return (rows, clients) if clients and codes == clients * code else None

    words = ["red", "green", "blue", "canary-47f1", *(f"word-{k}" for k in range(500))]
    for guess in (b"", bytes(32), b"mooring", nodes[0].digest.encode()):
        assert all(look_up(guess, word) is None for word in words)
    secret = bytes.fromhex(secrets.pop())
    assert look_up(secret, "canary-47f1") == (1, 1) and look_up(secret, "red")[1] == 5
    assert sum(look_up(secret, word) is not None for word in words) == 4


def test_dropped_columns_are_not_read(tmp_path, clock, parts):
    """With other values there, every client adds up the same numbers; without `drop` it does not."""
    run_categories(tmp_path / "one", dropped="aaaa")
    one = dict(parts)
    parts.clear()
    nodes, transport, _ = run_categories(tmp_path / "other", dropped="7")
    keyed = {
        LEVELS.name,
        "schema: survey",
        "schema: separation",
        "schema: ranges",
        LEVEL_NAMES.name,
    }  # with the hash of another secret
    assert [step for step, _ in one.values()] == [step for step, _ in parts.values()]
    for key, (step, values) in parts.items():
        assert step in keyed or np.array_equal(values, one[key][1])
    assert all(b"patient" not in sent for *_, sent in transport.sent)
    assert all("patient" not in node.statement["columns"] for node in nodes)


# (c) Cohorts that differ by a client, and tables that differ by a row.


def test_cohorts_that_differ_by_a_client_need_the_operators_agreement(tmp_path, clock):
    """Defence off (`again`): the difference of both runs' totals is the client that is in one of them only."""
    _, transport = start(tmp_path, sizes=(30, 31, 32, 33, 34))
    files, keys = tmp_path / "clients", identities(NAMES)
    federation = write_run(files, clients=4)

    def fewer(again):
        found = [
            AdviceClientNode(federation, files / f"{name}.csv", tmp_path / "state" / name, identity=keys[name])
            for name in NAMES[:4]
        ]
        for node in found:
            node.again = again
        return found

    with pytest.raises((RequestError, WorkError), match=r"other clients|signed"):
        run(federation, fewer(False), tmp_path / "less")
    _, smaller = run(federation, fewer(True), tmp_path / "less")
    sizes = [
        next(remove_tag(t)[0] for t in one.totals() if len(t) == 25 + 1 + TAG_WORDS) for one in (transport, smaller)
    ]
    assert int(sizes[0]) - int(sizes[1]) == 34  # the rows of the client that was left out


def test_rows_that_have_changed_need_the_operators_agreement(tmp_path, clock):
    """The difference of two runs, before and after one row was added, is that row."""
    start(tmp_path)
    path = tmp_path / "clients" / "cleo.csv"
    path.write_text(path.read_text() + "1.234,5.678,9.876\n")
    federation = write_run(tmp_path / "clients", "min_category_rows = 2")  # another run: there is nothing to resume
    known = identities(NAMES)

    def nodes(again):
        out = [
            AdviceClientNode(federation, file, tmp_path / "state" / file.stem, identity=known[file.stem])
            for file in sorted((tmp_path / "clients").iterdir())
        ]
        out[2].again = again
        return out

    with pytest.raises(RequestError, match="the rows of client 'cleo' have changed since a former run"):
        run(federation, nodes(False), tmp_path / "more")
    run(federation, nodes(True), tmp_path / "more")


# (f) Canaries, in all bytes that clients send.


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_of_rows_is_in_what_clients_send(masked, tmp_path, clock, parts, monkeypatch):
    """Defence off: without masks each client's part is there to read."""
    if not masked:
        monkeypatch.setattr(transcript, "mask", lambda values, name, secrets, digest: values.copy())
    nodes, transport, error = run_categories(tmp_path)
    assert error is None
    sent = {name: b"\n".join(out for who, _, _, out in transport.sent if who == name) for name in NAMES}
    own = {
        name: [v for (who, _), (_, v) in parts.items() if who == name and len(v) > 4 and v[:-1].any()] for name in NAMES
    }
    found = sum(values[:-1].tobytes() in sent[name] for name in NAMES for values in own[name])
    assert found == (0 if masked else sum(map(len, own.values())))
    everything = b"\n".join(sent.values())
    texts = ["canary-47f1", "patient", "secret-2-7"]
    numbers = []
    for node in nodes:
        frame = pd.read_csv(node.path)
        numbers += frame[["x0", "x1", "y"]].to_numpy().reshape(-1).tolist()
        home = home_rows(node.task, node.clients)
        numbers += home.jacobian[:, 0, :-1].reshape(-1).tolist()
        own_model = node.running.result[1].models
        numbers += [*own_model.local.v, *own_model.personal.v]
        texts += [read_json(path)["private"] for path in [node.sums / "key.json"]]
        texts += [read_json(node.sums / "secret.json")["secret"], *(secret.hex() for secret in node.secrets.values())]
    for text in texts:
        raw = text.encode()
        for form in (raw, raw.hex().encode(), base64.b64encode(raw)[:-4]):
            assert form not in everything
        if len(text) == 64:
            assert bytes.fromhex(text) not in everything
    numbers = np.array([number for number in numbers if abs(number) > 1e-3 and number != round(number)])
    for kind in ("<f8", ">f8"):
        words = {numbers.astype(kind)[k : k + 1].tobytes() for k in range(len(numbers))}
        assert not any(word in everything for word in words)
    long = [repr(number) for number in numbers.tolist() if len(repr(number)) > 12]
    assert len(long) > 100 and not any(text.encode() in everything for text in long)


# (g) Members together.


def test_all_members_but_one_open_the_last_ones_part_and_fewer_open_none(tmp_path, clock, parts):
    """This is what sums are: members know their own parts. Of two of five clients that are left they know the sum."""
    nodes, transport = start(tmp_path)
    number = next(n for (who, n), (step, _) in parts.items() if who == "ann" and step == MOMENTS.name)
    total = remove_tag(transport.totals()[number])
    assert next(step for (_, n), (step, _) in parts.items() if n == number) == MOMENTS.name
    others = np.sum([parts[name, number][1] for name in NAMES[1:]], axis=0, dtype=np.uint64)
    assert np.array_equal(total - others, parts["ann", number][1])
    few = np.sum([parts[name, number][1] for name in NAMES[2:]], axis=0, dtype=np.uint64)
    assert np.array_equal(total - few, parts["ann", number][1] + parts["bob", number][1])
    # From the message of one of two clients, three members remove their own masks; the pair's remain.
    ann = nodes[0]
    survey = next(n for (who, n), (step, _) in parts.items() if who == "ann" and step == "schema: survey")
    masked = next(transcript.from_text(read_json(ann.sums / "steps" / f"{survey}.json")["answer"]) for _ in range(1))
    digest = transcript.Transcript(ann.cohort).add("schema: survey", len(parts["ann", survey][1]), None)
    removed = dict.fromkeys(NAMES[2:], -1)
    alone = masked - transcript.mask(np.zeros_like(masked), "ann", {n: ann.secrets[n] for n in removed}, digest)
    assert is_noise(alone)
    bob = transcript.mask(np.zeros_like(masked), "ann", {"bob": ann.secrets["bob"]}, digest)
    assert np.array_equal((alone - bob)[:-TAG_WORDS], parts["ann", survey][1])  # with bob's secret, too, it is open
