"""Tasks and losses of the user's own, by the page that describes them."""

import re
import shlex
from importlib.metadata import EntryPoint

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.cli import main
from mooring.core import user_code
from mooring.core.errors import RequestError
from mooring.core.trusted_files import trust_code
from mooring.engines.request import user_code_specs
from mooring.estimates.task_random_effects import estimate_random_effects
from mooring.runs.directory import open_run
from mooring.tasks import catalog
from tests.estimates.planted import rows_of
from tests.support.repository import ROOT


def sales(tau=0.5, noise=1.0, clients=5, rows=24, seed=0):
    rng = np.random.default_rng(seed)
    parts = []
    for i in range(clients):
        x, w = rng.normal(size=(rows, 2)), np.array([1.0, -0.5]) + tau * rng.normal(size=2)
        y = x @ w + tau * rng.normal() + noise * rng.standard_t(3, size=rows)
        parts.append(pd.DataFrame({"shop": f"s{i:02d}", "area": x[:, 0], "staff": x[:, 1], "revenue": 100 + 10 * y}))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture
def page(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "adding-a-task.md").read_text()
    (tmp_path / "huber.py").write_text(re.search(r"```python\n(.*?)```", text, re.S).group(1))
    sales().to_csv(tmp_path / "sales.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return text


def huber(**fields):
    trust_code("huber.py")
    return catalog.build("huber.py:Huber", "regression", 2, 0, fields)


@pytest.mark.docs
def test_the_page_runs_as_it_stands(page, tmp_path, capsys):
    fit, advise = re.search(r"```bash\n(.*?)```", page, re.S).group(1).splitlines()
    for line, out in ((fit, "fitted"), (f"{advise} --shape linear", "advised")):  # nonlinear columns take a while
        with pytest.raises(SystemExit, match="0"):
            main([*shlex.split(line)[1:], "--out", out])
        assert "huber loss is" in capsys.readouterr().out
        assert user_code_specs(open_run(tmp_path / out).run) == [str(tmp_path / "huber.py") + ":Huber"]
    (tmp_path / "huber.py").unlink()  # the run has a copy
    table = mooring.open("advised").predict("sales.csv")
    assert len(table) == 120 and table.iloc[:, -2].notna().all()


def test_the_derivatives_of_the_example_are_right(page):
    task, (z, y) = huber(delta=0.7), torch.randn(2, 200, dtype=torch.float64, generator=torch.manual_seed(0))
    z.requires_grad_()
    slope = torch.autograd.grad(task.row_loss(z, y).sum(), z)[0]
    torch.testing.assert_close(task.row_slope(z, y), slope)
    bend = torch.autograd.grad(task.row_slope(z, y).sum(), z)[0]
    torch.testing.assert_close(task.row_bend(z, y), bend)


def test_the_metric_has_the_squared_unit_of_the_target(page):
    """The same table in cents: losses 10,000 times as large, and the same recommendations."""
    options = {"client": "shop", "target": "revenue", "task": "huber.py:Huber", "rounds": 3, "algorithm": "local"}
    euros = mooring.fit(sales(), **options).summary["personal"]
    cents = mooring.fit(sales().assign(revenue=lambda t: 100 * t["revenue"]), **options).summary["personal"]
    assert cents == pytest.approx(1e4 * euros, rel=1e-6)


def test_a_class_that_a_file_defines_is_a_task_too(page, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    from huber import Huber

    run = mooring.fit("sales.csv", client="shop", target="revenue", task=Huber, rounds=1)
    assert run.job.task.name == "huber"


@pytest.mark.parametrize("noise", [0.2, 1.0, 4.0])
def test_lam_follows_noise_and_variation_in_any_unit(page, noise):
    """tau / noise is 0.5, so that lam = dispersion / (n tau^2) has the same value in every unit of the target."""
    rng = np.random.default_rng(1)
    xs = [rng.normal(size=(30, 2)) for _ in range(100)]
    ys = [noise * (x @ (1 + 0.5 * rng.normal(size=2)) + 0.5 * rng.normal() + rng.normal(size=30)) for x in xs]
    task = huber(delta=100.0 * noise, ridge=0.0)  # half the squared error: the dispersion is the variance of the noise
    effects = estimate_random_effects(task, rows_of(xs, ys)).spread
    assert float(effects.noise[0]) == pytest.approx(noise**2, rel=0.1)
    assert float(effects.variance[0]) == pytest.approx(0.25 * noise**2, rel=0.25)


def test_auto_beats_local_models_of_a_new_loss(page):
    """Few rows of similar clients: a lam that ran into its cap, or a dispersion of 1, loses to the best of a grid."""
    options = {"client": "shop", "target": "revenue", "task": "huber.py:Huber", "rounds": 30, "split": (0.5, 0.0, 0.5)}
    table = sales(tau=0.3, noise=0.3, clients=30, rows=24)
    losses = {lam: mooring.fit(table, lam=lam, **options).summary["personal"] for lam in ("auto", 0.1, 0.5, 3, 24)}
    assert losses["auto"] < 1.03 * min(losses.values())
    local = mooring.fit(table, algorithm="local", **options).summary["personal"]
    assert losses["auto"] < local


def test_the_sums_for_its_dispersion_are_those_of_a_loop(page):
    rng = np.random.default_rng(2)
    x, y, w = rng.normal(size=(9, 2)), rng.normal(size=9), np.array([0.4, -1.0, 0.2])
    square, scale = huber(delta=0.7).dispersion_sums(torch.tensor(w)[None], rows_of([x], [y]).padded())
    residuals = [x[k] @ w[:2] + w[2] - y[k] for k in range(9)]
    assert float(square) == pytest.approx(sum(min(abs(r), 0.7) ** 2 for r in residuals))
    assert float(scale) == sum(abs(r) <= 0.7 for r in residuals)


def test_without_a_dispersion_one_sentence_states_what_auto_is(page, tmp_path):
    source = (tmp_path / "huber.py").read_text() + "    dispersion_sums = None\n"
    (tmp_path / "huber.py").write_text(source)
    options = {"client": "shop", "target": "revenue", "task": "huber.py:Huber", "rounds": 1}
    with pytest.warns(
        UserWarning, match="lam = 'auto' is 0.1 times the curvature: .* has no `dispersion_sums`; set lam"
    ):
        mooring.fit("sales.csv", **options)
    with pytest.raises(RequestError, match=r"lam = 'client' needs an estimate .*dispersion_sums"):
        mooring.fit("sales.csv", lam="client", **options)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("    unit_power = 2", "    pass"), "its metric 'huber loss' is a new one; state its unit by `unit_power`"),
        (('    name = "huber"', "    pass"), "lacks name"),
        (("Huber(ConvexScoreTask)", "Huber"), "must be a frozen dataclass that inherits from Task"),
        (('("regression",)', '("binary",)'), "task 'huber' fits a target that is binary, but this one is regression"),
    ],
)
def test_incomplete_tasks_are_refused(page, tmp_path, change, sentence):
    (tmp_path / "huber.py").write_text((tmp_path / "huber.py").read_text().replace(*change))
    with pytest.raises(RequestError, match=re.escape(sentence)):
        mooring.fit("sales.csv", client="shop", target="revenue", task="huber.py:Huber", rounds=1)


def test_installed_packages_offer_tasks_and_losses(page, tmp_path, monkeypatch):
    (tmp_path / "offered.py").write_text(
        "from huber import Huber\n\ndef cubic(output, y):\n    return (output.reshape(y.shape) - y).abs() ** 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("huber", "offered:Huber", "mooring.tasks"),
        EntryPoint("cubic", "offered:cubic", "mooring.losses"),
    ]

    def offered(group, name=None):
        return [point for point in points if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(user_code, "entry_points", offered)
    options = {"client": "shop", "target": "revenue", "rounds": 1}
    assert "huber" in catalog.names()
    assert mooring.fit("sales.csv", task="huber", **options).job.task.metric == "huber loss"
    model = torch.nn.Linear(2, 1)
    assert mooring.fit("sales.csv", model=model, loss="cubic", **options).job.task.has_own_loss
