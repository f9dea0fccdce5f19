"""Masked sums: totals to the bit, noise where anything differs between clients, and one answer per step."""

import json
from statistics import NormalDist

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mooring.core.errors import RequestError
from mooring.core.summing import Step, Sum, to_integers, to_values
from mooring.remote.secure_sums import is_signed, sign
from mooring.remote.transcript import (
    TAG_WORDS,
    Cohort,
    Journal,
    MaskedAnswers,
    Transcript,
    add_tag,
    check_cohort,
    check_tag,
    make_statement,
    make_tag,
    mask,
    pair_secrets,
    remove_tag,
    seal,
    unseal,
)

NAMES, COMMON, STEP = ("ann", "bob", "cleo", "dora"), bytes(range(32)), Step("moments", "for tests", 2.0**-10)
P = 2**255 - 19  # of X25519's field
SIZE = 4_000


def make_cohort(names=NAMES, keys=None):
    keys = keys or {name: X25519PrivateKey.from_private_bytes(bytes([k + 1]) * 32) for k, name in enumerate(names)}
    statements = [
        make_statement("run", "plan", name, ["x", "y"], keys[name].public_key().public_bytes_raw()) for name in names
    ]
    return Cohort(tuple(statements)), keys


def make_answers(folder, cohort, keys, names=NAMES, common=COMMON):
    return {
        name: MaskedAnswers(cohort, name, pair_secrets(keys[name], cohort, name), common, Journal(folder / name))
        for name in names
    }


def parts_of(seed, size=SIZE, names=NAMES):
    rng = np.random.default_rng(seed)
    return {name: Sum(STEP, rng.normal(size=(1, size)) * 1000) for name in names}


def add(answers):
    return np.sum(list(answers), axis=0, dtype=np.uint64)


def is_noise(words):
    """Whether 64-bit words look uniform: each bit is set in a share within the bounds of a normal test of all 64 bits
    at once (level 1e-6), and the words do not repeat."""
    n = len(words)
    shares = np.unpackbits(words.astype("<u8").view(np.uint8).reshape(n, 8), axis=1).mean(0)
    bound = NormalDist().inv_cdf(1 - 1e-6 / (2 * 64)) * 0.5 / np.sqrt(n)
    return bool((np.abs(shares - 0.5) < bound).all()) and len(np.unique(words)) == n


def test_totals_are_the_sums_of_whole_numbers_to_the_bit(tmp_path):
    cohort, keys = make_cohort()
    clients, total, plain = make_answers(tmp_path, cohort, keys), None, None
    for number in range(4):
        parts = parts_of(number)
        out = {name: client.answer(number, parts[name], total) for name, client in clients.items()}
        for name in NAMES:  # of a single client there is noise, all of its size
            assert is_noise(out[name]) and len(out[name]) == SIZE + 1 + TAG_WORDS
        total, plain = add(out.values()), add(to_integers(part) for part in parts.values())
        assert np.array_equal(remove_tag(total), plain)
        for client in clients.values():
            assert np.array_equal(client.check_total(total), plain)
        assert np.array_equal(
            to_values(plain, STEP, 4), sum(np.rint(part.values[0] / STEP.quantum) for part in parts.values()) * 2.0**-10
        )


def test_the_test_of_noise_finds_what_is_none(tmp_path):
    """Without masks, with the masks of one pair twice, and with one bit that is never set."""
    parts, rng = to_integers(parts_of(0)["ann"]), np.random.default_rng(0)
    noise = rng.integers(0, 2**64, SIZE, dtype=np.uint64)
    assert is_noise(noise) and not is_noise(parts)
    assert not is_noise(noise & ~np.uint64(2**40)) and not is_noise(np.tile(noise[:100], 40))


@pytest.mark.parametrize(
    "what", ["another total", "a client left out", "another cohort", "another step", "another order", "other secrets"]
)
def test_whatever_differs_between_clients_gives_noise(what, tmp_path):
    cohort, keys = make_cohort()
    clients, first, second = make_answers(tmp_path, cohort, keys), parts_of(1), parts_of(2)
    names = list(NAMES)
    if what == "another cohort":  # one client was told of fewer others
        smaller, _ = make_cohort(NAMES[:3], keys)
        clients["ann"] = make_answers(tmp_path / "other", smaller, keys, NAMES[:3])["ann"]
    if what == "other secrets":
        keys = keys | {"ann": X25519PrivateKey.generate()}
        clients["ann"] = make_answers(tmp_path / "other", cohort, keys)["ann"]
    if what == "a client left out":
        names.remove("dora")
    out = {name: clients[name].answer(0, first[name], None) for name in names}
    if what in ("another cohort", "a client left out", "other secrets"):
        assert is_noise(add(out.values()))
        return
    total = add(out.values())
    changed = total + np.uint64(1) if what == "another total" else total
    later = second["ann"] if what == "another total" else Sum(STEP._replace(name="other"), second["ann"].values)
    if what == "another order":  # the same step, but one client has skipped the step before
        fresh = make_answers(tmp_path / "other", cohort, keys)["ann"]
        answers = [fresh.answer(0, second["ann"], None)]
    else:
        answers = [clients["ann"].answer(1, later, changed)]
    answers += [clients[name].answer(1, second[name], total) for name in names[1:]]
    assert is_noise(add(answers))


def test_a_step_is_answered_once(tmp_path):
    cohort, keys = make_cohort()
    parts, clients = parts_of(3), make_answers(tmp_path, cohort, keys)
    first = {name: client.answer(0, parts[name], None) for name, client in clients.items()}
    total = add(first.values())
    second = clients["ann"].answer(1, parts["ann"], total)
    with pytest.raises(RequestError, match="is at step 2, not at step 1"):
        clients["ann"].answer(1, parts["ann"], total)
    again = make_answers(tmp_path, cohort, keys)["ann"]  # after a restart
    with pytest.raises(RequestError, match="is at step 0, not at step 1"):
        again.answer(1, parts["ann"], total)
    assert np.array_equal(again.answer(0, parts["ann"], None), first["ann"])
    with pytest.raises(RequestError, match="answers each step once"):
        again.answer(1, parts["ann"], total + np.uint64(1))
    again = make_answers(tmp_path, cohort, keys)["ann"]
    again.answer(0, parts["ann"], None)
    assert np.array_equal(again.answer(1, parts["bob"], total), second)  # what is stored, whatever the program computes


def test_an_answer_is_stored_before_it_is_sent(tmp_path, monkeypatch):
    """Killed before the write it sent nothing; killed after it, it sends the same bytes though its part has changed."""
    cohort, keys = make_cohort()
    write = Journal.write

    class Killed(BaseException):
        pass

    def killed_before(self, number, record):
        raise Killed

    def killed_after(self, number, record):
        write(self, number, record)
        raise Killed

    for kill in (killed_before, killed_after):
        folder = tmp_path / kill.__name__
        monkeypatch.setattr(Journal, "write", kill)
        with pytest.raises(Killed):
            make_answers(folder, cohort, keys)["ann"].answer(0, parts_of(0)["ann"], None)
        monkeypatch.setattr(Journal, "write", write)
        stored = Journal(folder / "ann").read(0)
        assert (stored is None) == (kill is killed_before)
        found = make_answers(folder, cohort, keys)["ann"].answer(0, parts_of(9)["ann"], None)
        assert stored is None or found.tobytes().hex() == stored["answer"]


def test_tags_find_every_change_of_a_total():
    """Also those of high bits, of two numbers that cancel, and of multiples."""
    rng, digest = np.random.default_rng(0), b"d" * 32
    parts = [np.append(rng.integers(-(2**60), 2**60, 50).view(np.uint64), np.uint64(1)) for _ in range(4)]
    total = add(add_tag(part, COMMON, digest) for part in parts)
    assert np.array_equal(check_tag(total, COMMON, digest), add(parts))
    exact = sum(make_tag(part, COMMON, digest) for part in parts) % 2**128
    assert exact == make_tag(add(parts), COMMON, digest)  # the tag of a sum is the sum of the tags
    last = len(total) - 1  # of its word, bits from 2^32 are above those of a tag
    changes = [{k: 1 << bit} for k in (0, 17, 50, 51, last) for bit in (0, 1, 31, 61, 63) if k < last or bit < 32]
    changes += [{0: 1, 1: 2**64 - 1}, {3: 2**63, 4: 2**63}, {51: 1, 52: 2**64 - 1}]
    for change in changes:
        false = total.copy()
        false[list(change)] += np.array(list(change.values()), np.uint64)
        with pytest.raises(RequestError, match="changed on its way"):
            check_tag(false, COMMON, digest)
    with pytest.raises(RequestError):
        check_tag(total * np.uint64(3), COMMON, b"e" * 32)
    with pytest.raises(RequestError):
        check_tag(total, bytes(32), digest)
    # A multiple of a total has the multiple of its tag; the number of clients in it is what refuses it.
    with pytest.raises(RequestError, match="not one of 4 clients"):
        to_values(remove_tag(total * np.uint64(3)), STEP, 4)


def test_weights_of_tags_differ_between_steps_and_numbers():
    one = np.array([1, 0, 0], np.uint64)
    weights = [make_tag(np.roll(one, k), COMMON, digest) for k in range(3) for digest in (b"a" * 32, b"b" * 32)]
    assert len(set(weights)) == 6 and min(weights) > 2**100


@pytest.mark.parametrize("disguise", ["capitals", "top bit", "another representative", "swapped"])
def test_one_key_in_two_statements_does_not_cancel_masks(disguise):
    """A member that states another's key in other bytes has the same secret with all others; masks with it and with the
    owner would cancel if they did not depend on names."""
    cohort, keys = make_cohort()
    own, raw = cohort.statements[1], keys["dora"].public_key().public_bytes_raw()
    if disguise == "capitals":
        text = raw.hex().upper()
    elif disguise == "top bit":  # X25519 ignores it
        text = (raw[:31] + bytes([raw[31] | 128])).hex()
    elif disguise == "swapped":
        text = raw.hex()
    else:  # numbers below 19 are also those plus the prime; this one is the base point
        text = (9 + P).to_bytes(32, "little").hex()
    false = cohort.statements[0] | {"public": text}
    statements = [false, *cohort.statements[1:]]
    if disguise in ("capitals", "swapped"):
        with pytest.raises(RequestError, match="not a client's statement|have the same key"):
            check_cohort(statements, own, 3)
        return
    changed = check_cohort(statements, own, 3)
    pairs = pair_secrets(keys["bob"], changed, "bob")
    if disguise == "top bit":
        assert pairs["ann"] == pairs["dora"]
    numbers = np.arange(SIZE, dtype=np.uint64)
    alone = {name: pairs[name] for name in ("ann", "dora")}
    assert is_noise(mask(numbers, "bob", alone, changed.digest) - numbers)


def test_keys_of_low_order_are_refused():
    points = [0, 1, P - 1, P, P + 1, 325606250916557431795983626356110631294008115727848805560023387167927233504]
    cohort, keys = make_cohort()
    for point in points:
        false = cohort.statements[2] | {"public": point.to_bytes(32, "little").hex()}
        changed = Cohort((*cohort.statements[:2], false, cohort.statements[3]))
        with pytest.raises(RequestError, match="key of client 'cleo' is no X25519 key"):
            pair_secrets(keys["ann"], changed, "ann")


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda s: s[1:], "own statement"),
        (lambda s: s[:2], "has 2 clients"),
        (lambda s: [s[1], s[0], *s[2:]], "every client once"),
        (lambda s: [*s, s[3]], "every client once"),
        (lambda s: [*s[:3], s[3] | {"name": "cleo"}], "every client once"),
        (lambda s: [*s[:3], s[3] | {"run": "other"}], "'dora' takes part with another run"),
        (lambda s: [*s[:3], s[3] | {"plan": "other"}], "'dora' takes part with another plan"),
        (lambda s: [*s[:3], s[3] | {"protocol": "other"}], "'dora' takes part with another protocol"),
        (lambda s: [*s[:3], s[3] | {"columns": ["x", "z", "y"]}], "'dora' has column 'z'"),
        (lambda s: [*s[:3], s[3] | {"columns": ["y", "x"]}], "another order"),
        (lambda s: [*s[:3], s[3] | {"public": s[2]["public"]}], "same key"),
        (lambda s: [*s[:3], s[3] | {"more": 1}], "not a client's statement"),
        (lambda s: [*s[:3], s[3] | {"public": 7}], "not a client's statement"),
        (lambda s: [*s[:3], s[3] | {"columns": [["x"]]}], "not a client's statement"),
        (lambda s: [*s[:3], None], "not a client's statement"),
        (lambda s: [*s[:3], "dora"], "not a client's statement"),
    ],
)
def test_cohorts_that_are_refused(change, why):
    cohort, _ = make_cohort()
    assert check_cohort(list(cohort.statements), cohort.statements[0], 4) == cohort
    with pytest.raises(RequestError, match=why):
        check_cohort(change(list(cohort.statements)), cohort.statements[0], 3)


def test_too_few_clients_for_a_policy_are_refused():
    cohort, _ = make_cohort()
    with pytest.raises(RequestError, match="at least 5"):
        check_cohort(list(cohort.statements), cohort.statements[0], 5)


def test_the_common_secret_is_for_its_receivers_only():
    cohort, keys = make_cohort()
    secrets = {name: pair_secrets(keys[name], cohort, name) for name in NAMES}
    sealed = seal(COMMON, "ann", secrets["ann"], cohort)
    assert set(sealed) == {"bob", "cleo", "dora"}
    for name in sealed:
        assert unseal(sealed[name], name, "ann", secrets[name]["ann"], cohort) == COMMON
    smaller, _ = make_cohort(NAMES[:3], keys)
    wrong = [
        (sealed["bob"], "cleo", "ann", secrets["cleo"]["ann"], cohort),  # another one's
        (sealed["bob"], "bob", "cleo", secrets["bob"]["cleo"], cohort),
        (sealed["bob"], "bob", "ann", secrets["bob"]["ann"], smaller),
        (sealed["bob"][:-2] + "00", "bob", "ann", secrets["bob"]["ann"], cohort),
        (sealed["bob"][:-2], "bob", "ann", secrets["bob"]["ann"], cohort),
        ("", "bob", "ann", secrets["bob"]["ann"], cohort),
        ("xyz", "bob", "ann", secrets["bob"]["ann"], cohort),
    ]
    for text, name, sender, shared, about in wrong:
        with pytest.raises(RequestError, match="common secret of client"):
            unseal(text, name, sender, shared, about)
    assert COMMON.hex() not in json.dumps(sealed)


def test_statements_of_other_keys_are_no_signatures():
    one, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    statement = make_cohort()[0].statements[0]
    signature = sign(one, statement)
    assert is_signed(one.public_key(), statement, signature)
    for public, value, text in [
        (other.public_key(), statement, signature),
        (one.public_key(), statement | {"name": "bob"}, signature),
        (one.public_key(), statement | {"public": "0" * 64}, signature),
        (one.public_key(), statement, ""),
        (one.public_key(), statement, None),
        (one.public_key(), statement, "x" * 1000),
    ]:
        assert not is_signed(public, value, text)


def test_digests_depend_on_all_that_was_said():
    cohort, keys = make_cohort()
    total, digests = np.arange(5, dtype=np.uint64), []
    for step, size, before in [("a", 5, total), ("b", 5, total), ("a", 6, total), ("a", 5, total[:4]), ("a", 5, None)]:
        transcript = Transcript(cohort)
        transcript.add("first", 4, None)
        digests.append(transcript.add(step, size, before))
    longer = Transcript(cohort)
    digests += [
        longer.add("first", 4, None),
        longer.add("first", 4, None),
        Transcript(make_cohort(NAMES[:3], keys)[0]).digest,
    ]
    assert len(set(digests)) == len(digests)
