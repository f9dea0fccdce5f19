"""The figures of an advice: everybody is in them, an outlier flattens nobody, the plan's lambda is marked."""

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.core.errors import RequestError
from mooring.report.figure_style import encode_image
from mooring.report.figures import draw_images, draw_improvements, draw_path, draw_rows_needed


def advice(gains, names=None, local=2.0, **plan):
    m = len(gains)
    clients = [
        {
            "client": names[i] if names else f"c{i}",
            "improvement_over_local_pct": 100 * g / local,
            "improvement_over_local_pct_ci_low": 100 * (g - 0.1) / local,
            "improvement_over_local_pct_ci_high": 100 * (g + 0.1) / local,
            "recommended": ("personal", "global", "local")[i % 3],
            "lam": plan.get("lams", [1.5] * m)[i],
        }
        for i, g in enumerate(gains)
    ]
    path = [{"family": "global", "lam": "Infinity", "loss": 3.0}, {"family": "local", "lam": 0.0, "loss": 2.5}]
    path += [{"family": "lambda", "lam": lam, "loss": 2 + np.log10(lam) ** 2} for lam in (0.01, 0.1, 1.5, 10, 100)]
    chosen = {"family": plan.get("family", "lambda"), "value": 1.5, "loss": plan.get("loss", 2.0)}
    return {"clients": clients, "path": path, "plan": chosen, "summary": {"metric": "mse"}}


def points(figure):
    """Places of all clients' marks, arrows apart."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() in ("o", ".") and len(line.get_ydata())]
    return np.concatenate([np.column_stack([line.get_xdata(), line.get_ydata()]) for line in lines])


def arrows(figure):
    return [line for line in figure.axes[0].lines if line.get_marker() in ("<", ">")]


def labels(figure):
    return " ".join(text.get_text() for legend in figure.legends for text in legend.get_texts())


@pytest.mark.parametrize("m", [3, 80, 81, 1_500])
def test_all_clients_are_drawn_in_percent_of_their_local_loss(m):
    gains = np.random.default_rng(0).normal(size=m)
    figure = draw_improvements(advice(gains.tolist(), local=4.0))
    assert sorted(points(figure)[:, 0]) == pytest.approx(sorted(100 * gains / 4))
    assert f"{m:,} clients" == figure.axes[0].get_ylabel()
    assert labels(figure).count("(") == len({i % 3 for i in range(m)})
    assert encode_image(figure, "svg") == encode_image(figure, "svg")


@pytest.mark.parametrize("m", [4, 60, 500])
def test_an_outlier_is_an_arrow_and_flattens_nobody(m):
    gains = np.linspace(0.1, 0.3, m)
    gains[0] = -1000.0
    figure = draw_improvements(advice(gains.tolist()))
    low, high = figure.axes[0].get_xlim()
    assert low > -100 and high < 100 and low < 0 < high
    (arrow,) = arrows(figure)
    assert arrow.get_xdata()[0] == low and "1 beyond the edge" in figure.axes[0].get_xlabel()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == (["-50,000%"] if m <= 80 else [])


def test_without_an_outlier_everything_is_inside():
    figure = draw_improvements(advice(np.linspace(-1, 1, 40).tolist()))
    low, high = figure.axes[0].get_xlim()
    assert low < -55 and high > 55 and not arrows(figure) and "edge" not in figure.axes[0].get_xlabel()


def test_gains_of_nothing_at_all_are_drawn():
    given = advice([0.0, 0.0])
    for row in given["clients"]:
        row |= {"improvement_over_local_pct_ci_low": 0.0, "improvement_over_local_pct_ci_high": 0.0}
    low, high = draw_improvements(given).axes[0].get_xlim()
    assert low < 0 < high


def test_names_are_never_formulas():
    figure = draw_improvements(advice([0.1, 0.2, 0.3], names=["$x_{$", "\\frac", "a$b$c"]))
    drawn = encode_image(figure, "svg").decode()
    assert "$x_{$" in drawn and "a$b$c" in drawn and "dc:date" not in drawn


def path_words(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()][-1]


def marked(figure):
    (mark,) = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    return float(mark.get_xdata()[0]), float(mark.get_ydata()[0])


def test_the_marked_lambda_is_the_plans():
    """Not the best of the path's, which is 1.5."""
    figure = draw_path(advice([0.1] * 3, lams=[0.1] * 3, loss=2.9))
    assert marked(figure) == (0.1, 2.9) and path_words(figure) == "plan: lambda = 0.1"
    figure = draw_path(advice([0.1] * 3, family="size", lams=[0.2, 0.8, 3.0]))
    assert marked(figure)[0] == 0.8 and path_words(figure) == "plan: lambda 0.2 to 3 by client, median 0.8"
    figure = draw_path(advice([0.1] * 3, lams=[100.0] * 3))
    assert path_words(figure).endswith("at the edge of what was tried")


@pytest.mark.parametrize("family,lam", [("global", float("inf")), ("local", 0.0), ("mixture", float("nan"))])
def test_plans_without_a_lambda_are_a_line(family, lam):
    figure = draw_path(advice([0.1] * 3, family=family, lams=[lam] * 3))
    assert path_words(figure).startswith("plan: ")
    assert not [line for line in figure.axes[0].lines if line.get_marker() == "D"]


def test_rows_until_a_local_model_matches():
    """The dotted level leads from the personal model of today to the rows at which a local model is as good."""
    rows = np.geomspace(30, 400, 41)
    curve = {"now": 60.0, "match": 200.0, "rows": rows.tolist(), "local": (1 + 200 / rows).tolist()}
    curve |= {"personal": (1 + (200 / rows) * (60 / 200)).tolist(), "global": [20.0] * 41}  # far: left out
    figure = draw_rows_needed({"learning_curve": curve, "summary": {"metric": "mse"}})
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert {"local", "personal"} <= set(lines) and "global" not in lines
    ends = next(line for line in figure.axes[0].lines if list(line.get_xdata()) == [60.0, 200.0])
    assert ends.get_ydata() == pytest.approx([2.0, 2.0], rel=1e-2)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["60 now", "200 to match"]
    near = draw_rows_needed({"learning_curve": curve | {"global": [3.0] * 41}, "summary": {"metric": "mse"}})
    assert "global" in [line.get_label() for line in near.axes[0].lines]
    with pytest.raises(RequestError, match="no learning curve"):
        draw_rows_needed({"learning_curve": None})


def test_losses_far_apart_have_a_logarithmic_axis():
    near, far = advice([0.1] * 3), advice([0.1] * 3)
    far["path"][0]["loss"] = 200.0
    assert draw_path(near).axes[0].get_yscale() == "linear" and draw_path(far).axes[0].get_yscale() == "log"


def test_plot_knows_its_figures():
    with pytest.raises(RequestError, match=r"unknown figure 'lam'; known: improvements, path, rows, curves"):
        mooring.plot(None, "lam")


def test_the_curves_of_a_comparison(tmp_path):
    """One line per method, a band where there are several seeds, and a method of one round across."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(list("abc"), 30), "x": rng.normal(size=90), "y": rng.normal(size=90)})
    how = {"client": "site", "target": "y", "rounds": 4, "evaluate_every": 1, "threads": 1}
    found = mooring.compare(frame, ["local", "fedavg"], seeds=2, out=tmp_path / "run", **how)
    figure = mooring.plot(tmp_path / "run", "curves")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"local", "fedavg"}
    mean = found.curves[found.curves["method"] == "fedavg"].groupby("round")["test_loss"].mean()
    np.testing.assert_allclose(lines["fedavg"].get_ydata(), mean)
    assert lines["local"].get_xdata().tolist() == [0, 4] and len(figure.axes[0].collections) == 2
    draw_images(tmp_path / "run")
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000 and (tmp_path / "run" / "curves.svg").exists()
