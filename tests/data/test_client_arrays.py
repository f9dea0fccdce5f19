"""Arrays and data sets by client: what is taken as it is, and what is refused in one sentence."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

import mooring
from mooring.core.errors import RequestError
from mooring.data.client_arrays import load_client_arrays

RNG = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 3, generator=RNG), torch.arange(20) % 3
LOADED = DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(SequentialSampler(range(20)), 5, True))


class Items:
    """A data set that is not torch's, as that of HuggingFace."""

    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return {"input": X[i], "label": int(Y[i])}


class Half(list):
    """A batch sampler that leaves rows out."""


WEIGHTED = BatchSampler(WeightedRandomSampler(torch.ones(20), 20), 5, False)


REFUSED = {
    "sparse": ((X.to_sparse(), Y), "are dense"),
    "nested": ((torch.nested.nested_tensor(list(X), layout=torch.jagged), Y), "are dense"),
    "ragged": (([[1.0], [1.0, 2.0]], [0, 1]), "rows of unequal lengths"),
    "a number": ((torch.tensor(1.0), Y), "one entry per row, got the single number 1.0"),
    "several targets": ((X, (Y, Y)), "several targets are given as a tuple; make them columns"),
    "named targets": ((X, {"a": Y}), "several targets are given as a dict"),
    "two loaders": ((LOADED, LOADED), "a client's rows are"),
    "no rows": ((X[:0], Y[:0]), "no client has any rows"),
    "no targets": ((X[:, :1], torch.full((20, 2), -100)), "no row has a target"),
    "weighted batches": (DataLoader(TensorDataset(X, Y), batch_sampler=WEIGHTED), "WeightedRandomSampler is not used"),
    "own batches": (DataLoader(TensorDataset(X, Y), batch_sampler=Half([[0, 1]])), "Half is not used"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_a_sentence(name):
    data, sentence = REFUSED[name]
    with pytest.raises(RequestError, match=sentence):
        load_client_arrays({"a": data, "b": data})


def test_a_client_without_rows_is_named():
    with pytest.raises(RequestError, match="client 'b' has 0 rows"):
        load_client_arrays({"a": (X, Y), "b": (X[:0], Y[:0])})


def test_two_classes_are_no_three():
    with pytest.raises(RequestError, match="there is a class 2; use 'classes'"):
        load_client_arrays({"a": (X, Y)}, target_type="binary")


def test_batch_samplers_of_all_rows_and_frames_are_taken(recwarn):
    frame = pd.DataFrame(X.numpy()), pd.Series(Y.numpy())
    frame[0].values.flags.writeable = False
    clients = load_client_arrays({"a": LOADED, "b": frame, "c": (X.numpy().tolist(), np.asarray(Y))})
    assert all(int(clients.train.size[i]) == int(clients.train.size[0]) for i in range(3)) and not recwarn


def test_data_sets_that_are_not_torchs_are_read_item_by_item():
    class Named(nn.Linear):
        def forward(self, input):
            return super().forward(input)

    options = {"algorithm": "fedavg", "rounds": 1, "baselines": False, "settings": {"eta": 0.1, "steps": 2, "batch": 4}}
    result = mooring.fit([Items(), Items()], model=lambda: Named(3, 3), **options)
    expected = mooring.fit([({"input": X}, Y)] * 2, model=lambda: Named(3, 3), **options)
    assert torch.equal(result.models["client 0"], expected.models["client 0"])
