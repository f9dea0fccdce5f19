"""Registrations: every claim has one, records answer them, and nothing unregistered is written."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mooring.core.errors import RequestError
from mooring.core.papers import PAPERS
from mooring.runs.atomic_files import read_json
from mooring_papers.base import catalog, registry
from mooring_papers.base.claims import HELD
from mooring_papers.base.records import list_outdated
from mooring_papers.base.reproduce import reproduce

RECORDS = Path(__file__).parents[1] / "docs" / "reproduction"
PAPERS_FOLDER = "MOORING_PAPERS"  # the papers as text, each file beginning with its number
ALL = [one for paper in catalog.list_papers() for one in registry.read_registrations(paper)]


@pytest.mark.parametrize("one", catalog.list_experiments())
def test_every_claim_is_registered_as_it_stands_in_the_code(one):
    entry = catalog.load_experiment(one)
    known = registry.require_registered(entry)
    assert set(known) == {claim.id for claim in entry.experiment.claims}
    for claim in entry.experiment.claims:
        assert "<lambda>" not in claim.check.text and " object at " not in claim.check.text
    run = next(iter(known.values())).run
    size = entry.experiment.presets[run["preset"]]
    assert run["clients"] == size.settings.get("clients", run["clients"]) or not size.settings["clients"]
    assert run["rounds"] == size.settings.get("rounds", run["rounds"]) or not size.settings["rounds"]


def test_what_has_no_experiment_says_why():
    known = {(entry.id, claim.id) for entry in catalog.select_experiments("all") for claim in entry.experiment.claims}
    for one in ALL:
        if (one.experiment, one.id) not in known and one.version == current_version(one):
            assert one.not_run and (one.run.get("takes") or one.claim.get("takes")), one.id


def current_version(one):
    return registry.newest_registrations(one.paper)[one.experiment, one.id].version


def test_a_change_is_a_new_version_with_a_reason():
    seen = set()
    for one in ALL:
        key = (one.experiment, one.id, one.version)
        assert key not in seen
        seen.add(key)
        assert one.version == 1 or one.claim["reason"]
        assert one.version == 1 or (one.experiment, one.id, one.version - 1) in seen


def test_the_digest_covers_what_is_fixed_before_the_run():
    one = registry.newest_registrations("apfl")["apfl-fig1", "fedavg-training-loss-grows"]
    for name in registry.CLAIM_FIELDS:
        assert replace(one, claim={**one.claim, name: "other"}).digest != one.digest or name == "version"
    for name in registry.RUN_FIELDS:
        assert replace(one, run={**one.run, name: "other"}).digest != one.digest
    assert replace(one, claim={**one.claim, "tried": "more"}).digest == one.digest


def test_records_answer_registrations():
    """Every record that decides something names registrations that there are, and none is held on stand-in data."""
    known = {one.digest: one for one in ALL}
    for path in sorted(RECORDS.glob("*.json")):
        record = read_json(path)
        for claim in record.get("claims", ()):
            if claim.get("registration") is None:
                continue
            one = known[claim["registration"]]
            assert (one.experiment, one.id, one.version) == (record["experiment"], claim["claim"], claim["version"])
            assert record["preset"] == one.run["preset"] and record["repeats"] == one.run["repeats"]
            assert record["made"].keys() >= {"version", "versions", "data"}
            assert {"code", "trials"} & record["made"].keys()
            assert one.run["label"] != registry.STAND_IN or claim["word"] != HELD


def test_no_record_of_the_repository_is_outdated():
    assert list_outdated(RECORDS) == []


def test_an_unregistered_claim_is_refused(monkeypatch, tmp_path):
    entry = catalog.load_experiment("kernel-fig1")
    claim = entry.experiment.claims[0]
    for other, sentence in (
        (replace(claim, id="new"), "claim 'new' is not registered"),
        (replace(claim, says="something else"), "is tested otherwise than registered"),
        (replace(claim, check=entry.experiment.claims[1].check), "is tested otherwise than registered"),
    ):
        changed = entry._replace(experiment=replace(entry.experiment, claims=[other]))
        monkeypatch.setattr(catalog, "select_experiments", lambda what, changed=changed: [changed])
        for more in ({}, {"repeats": 2}):
            with pytest.raises(RequestError, match=re.escape(sentence)):
                reproduce("kernel-fig1", "quick", tmp_path, **more)
    assert not list(tmp_path.iterdir())


def test_only_the_registered_run_decides(session_cache, tmp_path):
    entry, known = registry.apply_registration(catalog.load_experiment("kernel-fig1"), "quick")
    assert known and entry.experiment.presets["quick"].first_seed == 1000
    assert registry.apply_registration(catalog.load_experiment("kernel-fig1"), "paper")[1] == {}
    (record,) = reproduce("kernel-fig1", "smoke", tmp_path, workers=1)
    assert all(claim["registration"] is None for claim in record["claims"])


@pytest.mark.skipif(PAPERS_FOLDER not in os.environ, reason=f"{PAPERS_FOLDER} names no folder with the papers' texts")
def test_every_quotation_is_in_its_paper():
    numbers = {paper.key: paper.alias for paper in PAPERS}
    texts = {}
    for one in ALL:
        if one.paper not in texts:
            (file,) = Path(os.environ[PAPERS_FOLDER]).glob(f"{numbers[one.paper]}*.txt")
            texts[one.paper] = plain(file.read_text())
        assert plain(one.claim["quote"]) in texts[one.paper], (one.experiment, one.id)


def plain(text):
    """Without the line numbers of a draft, words broken at the end of a line, and its line breaks."""
    text = re.sub(r"\n\s*\d{3,4}(?=\s)", "\n", text)
    return re.sub(r"\s+", " ", re.sub(r"-\n\s*", "", text))
