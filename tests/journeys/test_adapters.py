"""The page on adapters works as typed; its LoRA example needs peft and transformers."""

import re
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.repository import ROOT

NEEDED = ("peft", "transformers")
LORA = "adapters.py", "from adapters import"


def run_blocks(tmp_path, monkeypatch, with_lora):
    """What the page's blocks define, run one after another in an empty folder."""
    text = (ROOT / "docs" / "network-adapters.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    known = {}
    for source in re.findall(r"```python\n(.*?)```", text, re.S):
        if any(mark in source for mark in LORA) and not with_lora:
            continue
        if file := re.match(r"# (\w+\.py)\n", source):
            (tmp_path / file.group(1)).write_text(source)
        else:
            exec(compile(source, "network-adapters.md", "exec"), known)
    return known


def test_the_page_works_as_typed(tmp_path, monkeypatch):
    assert "net" in run_blocks(tmp_path, monkeypatch, with_lora=False)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:the clients' networks")
@pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs peft and transformers")
def test_adapters_are_personal_and_the_body_is_frozen(tmp_path, monkeypatch):
    known = run_blocks(tmp_path, monkeypatch, with_lora=True)
    sys.modules.pop("adapters")
    first, second = (dict(known["result"].module(f"site {i}").named_parameters()) for i in (0, 1))
    adapters = [name for name in first if ".lora_" in name]
    classifier = [name for name in first if "classifier.modules_to_save" in name]
    assert len(adapters) == 4 and len(classifier) == 2
    for name, part in first.items():
        assert torch.equal(part, second[name]) == (name not in adapters), name
    frozen = [name for name in first if name not in (*adapters, *classifier)]
    assert frozen and all(not first[name].requires_grad for name in frozen)
