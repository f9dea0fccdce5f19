"""`predict` takes what a network takes: arrays, tuples, dictionaries and data sets, from `fit` and from a saved run."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import mooring

M, N = 3, 8


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, wide, narrow):
        return self.first(wide) + self.second(narrow)


class Images(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def train(net, inputs, tmp_path):
    y = torch.arange(N) % 3
    data = {}
    for i, x in enumerate(inputs):
        pair = x(y) if callable(x) else (x, y)
        data[f"c{i}"] = {"train": pair, "validation": pair, "test": pair}
    settings = {"eta": 0.1, "steps": 2, "batch": 4}
    options = {"algorithm": "ditto", "settings": settings | {"lam": 0.1}, "rounds": 2, "baselines": False}
    result = mooring.fit(net, data, out=tmp_path / "run", **options)
    return result, mooring.open(tmp_path / "run", model=net)


def check(answers, result, call):
    with torch.no_grad():
        expected = torch.softmax(call(result.module("c1")), 1)
    torch.testing.assert_close(torch.as_tensor(answers), expected)


@pytest.mark.parametrize("structure", [dict, tuple])
def test_several_inputs(structure, tmp_path):
    rng = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(N, 4, generator=rng), torch.randn(N, 2, generator=rng)) for _ in range(M)]
    inputs = [dict(zip(("wide", "narrow"), pair)) if structure is dict else pair for pair in pairs]
    result, saved = train(TwoInputs(), inputs, tmp_path)
    for source in (result, saved):
        check(source.predict(inputs[1], "c1"), result, lambda net: net(*pairs[1]))
    if structure is dict:
        arrays = {name: part.numpy() for name, part in inputs[1].items()}
        check(result.predict(arrays, "c1"), result, lambda net: net(*pairs[1]))


def test_data_sets_and_arrays_for_a_network_that_was_trained_on_data_sets(tmp_path):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(N, 4)).astype(np.float32) for _ in range(M)]
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    result, saved = train(net, [lambda y, x=x: Images(x, y) for x in xs], tmp_path)
    x = torch.from_numpy(xs[1])
    for given in (x, xs[1], Images(x, torch.zeros(N))):
        for source in (result, saved):
            check(source.predict(given, "c1"), result, lambda net: net(x))
