"""What the documentation shows is executed."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from mooring.algorithms.fedavg import FedAvg
from tests.problems import PROBLEMS, simulate

ROOT = Path(__file__).parent.parent


def test_the_example_algorithm_runs():
    text = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    module = types.ModuleType("anchor")
    sys.modules["anchor"] = module
    try:
        exec(compile(source, "anchor.py", "exec"), module.__dict__)
        task, clients = PROBLEMS["linear"]()
        server, models, _ = simulate(module.Anchor(keep=0.0), task, clients, rounds=5)
        plain, _, _ = simulate(FedAvg(), task, clients, rounds=5)
        torch.testing.assert_close(server.w, plain.w)
        assert models.shape == (5, 4) and not torch.equal(models[0], models[1])
    finally:
        del sys.modules["anchor"]


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
