"""Runs of every kind on a small federation whose clients have hostile names, for tests of reports."""

import numpy as np
import pandas as pd
import pytest

from mooring.cli import main
from mooring.report.html_report import render_report
from mooring.report.report_contents import ReportContents, add_certainty

HOSTILE = ["</script><script>document.title='hurt'</script>", "<img src=x onerror=document.title='hurt'>", '=1+1,"x"']
NAMES = [*HOSTILE, "@SUM(A1)", "-2+3", "Zoë & Söhne", *(f"town {i}" for i in range(24))]


def federation():
    """30 clients with planted linear models."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=3) + 0.5 * rng.normal(size=(len(NAMES), 3))
    parts = []
    for name, own in zip(NAMES, truth):
        x = rng.normal(size=(25, 3))
        y = x @ own + rng.normal(size=25)
        parts.append(pd.DataFrame(x, columns=["x0", "x1", "x2"]).assign(who=name, y=y))
    return pd.concat(parts, ignore_index=True)


def run_of(command, table):
    """The directory of a finished command on the table."""
    out = f"{command[0]}-run"
    with pytest.raises(SystemExit) as left:
        main([command[0], str(table), "--client", "who", "--target", "y", "--threads", "1", "--out", out, *command[1:]])
    assert left.value.code == 0
    return out


def advised(folder):
    """A run of each kind in a folder, by kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        federation().to_csv("table.csv", index=False)
        methods = ["compare", "--methods", "local,pooled,fedprox_personal", "--rounds", "4"]
        commands = (["advise"], ["fit", "--rounds", "6"], methods)
        return {command[0]: folder / run_of(command, "table.csv") for command in commands}


def page_of_many(m):
    """The report of recommendations for m clients, made up."""
    rng = np.random.default_rng(0)
    sides = [f"improvement_over_{o}_pct{end}" for o in ("local", "global") for end in ("", "_ci_low", "_ci_high")]
    wide = [*sides, "local", "global", "personal", "lam", "probability_better_than_local"]
    wide += ["probability_better_than_global", "distance", "rows_to_match", "contribution"]
    clients = pd.DataFrame(rng.random((m, len(wide))), columns=wide).assign(
        client=[f"a client with a name, number {i}" for i in range(m)],
        recommended=rng.choice(["personal", "global", "local"], m),
        confidence=rng.choice(["high", "moderate", "low"], m),
        rows=rng.integers(5, 500, m),
    )
    lams = np.logspace(-3, 3, 13).tolist()
    plan = {"family": "size", "about": "by size", "loss": 1.0, "low": 0.1, "middle": 1.0, "high": 9.0}
    path = {"lam": lams, "loss": lams, "local": 1.0, "global": 1.0, "rows": m, "plan": plan}
    own = {"names": list("abcdefghij"), "global": [0.0] * 10, "personal": rng.random((m, 10)).tolist()}
    return render_report(
        [
            ReportContents(
                name="run",
                purpose="advise",
                title="many",
                metric="mse",
                decision="Yes",
                headline="Yes.",
                summary=[],
                details=[],
                notes=[],
                models=[{"name": "personal", "about": "", "loss": 1.0}],
                losses_of="mean over held-out rows",
                clients=add_certainty(clients),
                recommends=True,
                client_level=0.9,
                margin=0.01,
                commands=[],
                settings="",
                path={**path, "clients": rng.random((m, len(lams))).tolist()},
                coefficients=own,
            )
        ]
    )
