"""Clip, noise, epsilon and ledger are what they say."""

import importlib.util
import math
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

import mooring
from mooring.algorithms.fedavg import FedAvg
from mooring.cli import main
from mooring.core.aggregation import flatten_messages
from mooring.core.errors import RequestError
from mooring.engines.fit import resume_fit
from mooring.engines.privacy import LEDGER_FILE, NOISE_KEY_FILE, PrivateMean, compute_epsilon, draw_normals
from mooring.engines.reply_checks import clip_messages
from mooring.engines.training_state import TrainingPlan
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run

pytest.importorskip("dp_accounting")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(160, 2)), columns=["a", "b"]).assign(who=np.repeat(list("abcdefgh"), 20))
    frame.assign(y=frame["a"] - frame["b"] + 0.3 * rng.normal(size=160)).to_csv("rows.csv", index=False)
    return "rows.csv"


HOW = {"client": "who", "target": "y", "algorithm": "fedavg", "threads": 1, "clip": 0.5, "noise": 2.0, "rounds": 6}


@pytest.mark.parametrize("noise,releases,delta", [(0.7, 1, 1e-5), (2.0, 10, 1e-6), (5.0, 300, 1e-5), (1.0, 50, 1e-3)])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise, releases, delta):
    """Balle and Wang (2018), Theorem 8, solved here; the accountants of dp-accounting bound it from above."""
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    s = noise / math.sqrt(releases)

    def excess(e):
        return stats.norm.cdf(1 / (2 * s) - e * s) - math.exp(e) * stats.norm.cdf(-1 / (2 * s) - e * s) - delta

    right = optimize.brentq(excess, 0, 500 if excess(500) < 0 else 700, xtol=1e-12)
    assert compute_epsilon(noise, releases, delta) == pytest.approx(right, abs=1e-6)
    upper = RdpAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(noise), releases)).get_epsilon(delta)
    assert right <= upper + 1e-9


def test_nothing_released_costs_nothing():
    assert compute_epsilon(1.0, 0, 1e-5) == 0


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=100, deadline=None)
def test_the_clip_is_never_exceeded(seed, most, dtype):
    """100 updates of all sizes in each of 100 examples; lengths are taken in float64: their error is below 1e-14."""
    made = torch.Generator().manual_seed(seed)
    size = 10.0 ** (40 * torch.rand(100, 1, generator=made) - 20)
    update = (torch.randn(100, 7, generator=made) * size).to(dtype)
    length = clip_messages(update, most).double().norm(dim=1)
    assert bool((length <= most * (1 + 1e-14)).all())
    short = update.double().norm(dim=1) < 0.999 * most
    assert clip_messages(update, most)[short].equal(update[short])


def test_the_noise_is_as_large_as_asked_and_normal():
    """A million numbers: their standard deviation is known to 1 / sqrt(2e6) = 0.07 %, so 1 % is 14 of those."""
    x = draw_normals(b"any key", 10**6).numpy()
    assert abs(x.std() - 1) < 0.01 and abs(x.mean()) < 0.005
    assert stats.kstest(x[:100_000], "norm").pvalue > 1e-4
    half = len(x) // 2
    assert abs(np.corrcoef(x[:half], x[half:])[0, 1]) < 5 / math.sqrt(half)
    assert not draw_normals(b"another key", 10).equal(draw_normals(b"any key", 10))


def test_the_mean_is_the_clipped_sum_and_noise_of_the_right_size():
    d, clip, noise = 200_000, 0.5, 3.0
    private = PrivateMean(noise, clip, 1e-5, 4)
    message = torch.zeros(3, d, dtype=torch.float64)
    message[:, 0] = torch.tensor([10.0, 0.1, -4.0])
    cohort, who = torch.tensor([0, 1, 3, 2]).sort().values, torch.tensor([0, 1, 3])  # client 2 sent nothing of use
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    mean = private.mean(message, who, cohort, p, 1)
    sigma = noise * clip * 0.4
    assert float(mean[1:].std()) == pytest.approx(sigma, rel=0.01)
    assert abs(float(mean[0]) - (0.4 * 0.5 + 0.3 * 0.1 - 0.1 * 0.5)) < 6 * sigma
    assert private.taken.tolist() == [1, 1, 1, 1]


def test_the_same_messages_again_are_no_release_and_others_have_fresh_noise():
    private = PrivateMean(1.0, 1.0, 1e-5, 2)
    ask = (torch.arange(2), torch.arange(2), torch.tensor([0.5, 0.5]))
    message = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    first, once = private.mean(message, *ask, 1), private.epsilon
    assert private.mean(message, *ask, 1).equal(first) and private.epsilon == once
    changed = message.clone()
    changed[0, 0] += 1e-9
    second = private.mean(changed, *ask, 1)
    assert float((second - first).abs().min()) > 1e-6 and private.epsilon > once
    assert not private.mean(message, *ask, 2).equal(first)


def test_a_run_tells_epsilon_each_round(rows, capsys):
    command = [rows, "--client", "who", "--target", "y", "--algorithm", "fedavg", "--rounds", "6", "--clip", "0.5"]
    with pytest.raises(SystemExit) as left:
        main(["fit", *command, "--noise", "2", "--out", "run"])
    assert left.value.code == 0
    said = capsys.readouterr()
    rounds = open_run("run").rounds
    right = [compute_epsilon(2.0, t, 1e-5) for t in range(1, 7)]
    np.testing.assert_allclose(rounds["epsilon"], right, rtol=0, atol=1e-6)
    for t, epsilon in enumerate(right, 1):
        assert f"epsilon {epsilon:.3g} ({t} of 6)" in said.err
    assert f"epsilon = {right[-1]:.3g} at delta = 1e-05" in " ".join(said.out.split())
    page = (Path("run") / "report.html").read_text()
    assert f"epsilon = {right[-1]:.3g} at delta = 1e-05" in page and '"epsilon":[' in page
    ledger = read_json("run/" + LEDGER_FILE)
    assert ledger["epsilon"] == pytest.approx(right[-1]) and len(ledger["releases"]) == 6
    assert stat.S_IMODE(open_run("run").path.joinpath(NOISE_KEY_FILE).stat().st_mode) == 0o600


def test_who_takes_part_in_half_of_the_rounds_pays_for_those(rows):
    done = mooring.fit(rows, **HOW | {"participation": 0.5})
    assert done.rounds["epsilon"].iloc[-1] < compute_epsilon(2.0, 6, 1e-5)


def test_the_ledger_is_written_before_the_release(rows, monkeypatch):
    """A crash at any merge leaves a ledger that counts that round already, and a resume does not count it again."""
    here, merge = Path.cwd(), FedAvg.server_update

    def dies(self, server, mean, round):
        if round.t == 5:
            raise KeyboardInterrupt
        return merge(self, server, mean, round)

    monkeypatch.setattr(FedAvg, "server_update", dies)
    with pytest.raises(KeyboardInterrupt):
        mooring.fit(rows, **HOW | {"checkpoint_every": 2}, out="killed")
    assert len(read_json("killed/" + LEDGER_FILE)["releases"]) == 5
    monkeypatch.undo()
    monkeypatch.chdir(here)
    resume_fit("killed")
    ledger = read_json("killed/" + LEDGER_FILE)
    assert [entry["round"] for entry in ledger["releases"]] == [1, 2, 3, 4, 5, 6]
    assert ledger["epsilon"] == pytest.approx(compute_epsilon(2.0, 6, 1e-5), abs=1e-6)


def test_two_private_runs_of_one_seed_differ(rows):
    one, two = (mooring.fit(rows, **HOW) for _ in range(2))
    assert not one.trained.common.equal(two.trained.common)


@pytest.mark.parametrize(
    "changes,why",
    [
        ({"clip": None}, "noise = 2 needs clip"),
        ({"average": "median"}, "noise = 2 goes with average = 'mean'"),
        ({"algorithm": "local"}, "noise = 2 does not apply: local sends nothing"),
        ({"algorithm": "pooled"}, "the messages of pooled are no changes of a model"),
        ({"algorithm": "kernel_fedavg", "task": "kernel"}, "no changes of a model"),
        ({"noise": None, "delta": 1e-6}, "delta = 1e-06 is for noise; give noise too"),
        ({"noise": -1.0}, "noise must be a number >= 0.01"),
        ({"delta": 1.0}, "delta must be"),
    ],
)
def test_what_cannot_be_private_is_refused(rows, changes, why):
    with pytest.raises(RequestError, match=why):
        mooring.fit(rows, **HOW | changes)


def test_without_the_accountant_nothing_starts(rows, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "dp_accounting" else found(name, *of)
    )
    with pytest.raises(RequestError, match=r"install it, or mooring-fl\[privacy\]"):
        mooring.fit(rows, **HOW)


def test_with_little_noise_it_is_the_mean_of_clipped_messages():
    message = torch.randn(4, 3, dtype=torch.float64)
    p, everyone = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.arange(4)
    found = PrivateMean(0.01, 0.7, 1e-5, 4).mean(message, everyone, everyone, p, 1)
    right = (p[:, None] * flatten_messages(clip_messages(message, 0.7))).sum(0)
    torch.testing.assert_close(found, right, rtol=0, atol=6 * 0.01 * 0.7 * 0.4)
    assert TrainingPlan().noise is None
