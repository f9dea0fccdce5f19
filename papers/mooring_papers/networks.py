"""Models of the papers' experiments on images; networks as functions that make them. Widths that the papers do not
print are ours."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from mooring.core.task import Task
from mooring.tasks.compiled_steps import compile_steps, is_numba_available
from mooring.tasks.logistic import Logistic

MakeNetwork = Callable[[], nn.Module]
LARGE = 100  # features from which compiled steps pay for their compilation


def softmax(features: int, classes: int, ridge: float) -> Task:
    """Softmax regression; on large images by compiled steps where they are installed, equal up to rounding."""
    task = Logistic(features, classes, ridge=ridge, dtype=torch.float32)
    return compile_steps(task) if steps(features) == "numba" else task


def steps(features: int) -> str:
    """Return the kind of steps for this number of features: compiled ones if they are installed, or PyTorch's."""
    return "numba" if features >= LARGE and is_numba_available() else "torch"


def mlp(*widths: int) -> MakeNetwork:
    """Fully connected layers with ReLU between them: mlp(784, 200, 200, 10)."""

    def make() -> nn.Module:
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return make


def cnn(
    channels: int, side: int, classes: int, convolutions: tuple[int, int] = (8, 16), hidden: int = 64
) -> MakeNetwork:
    """Two 5x5 convolutions with ReLU and 2x2 pooling, then two linear layers; images are [channel, row, column]."""
    first, second = convolutions

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, first, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (side // 4) ** 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    return make


class LSTM(nn.Module):
    """Token codes [B, length] through an embedding and stacked LSTM layers; the last step's state is classified.

    Written in plain operations, because stacked clients (vmap) cannot use the fused kernel. Code 0 is padding at the
    end of a text: it leaves the state unchanged.
    """

    def __init__(self, vocabulary: int, classes: int, embedding: int, hidden: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        widths = [embedding] + [hidden] * (layers - 1)
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * hidden) for width in widths)
        self.states = nn.ModuleList(nn.Linear(hidden, 4 * hidden, bias=False) for _ in widths)
        self.out = nn.Linear(hidden, classes)
        self.hidden = hidden

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        real = (tokens != 0)[..., None]
        for into, recurrent in zip(self.inputs, self.states):
            gates = into(x)
            h = c = torch.zeros_like(gates[:, 0, : self.hidden])
            steps = []
            for t in range(tokens.shape[1]):
                i, f, g, o = (gates[:, t] + recurrent(h)).chunk(4, -1)
                new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                new_h = torch.sigmoid(o) * torch.tanh(new_c)
                c, h = torch.where(real[:, t], new_c, c), torch.where(real[:, t], new_h, h)
                steps.append(h)
            x = torch.stack(steps, 1)
        return self.out(x[:, -1])


def lstm(vocabulary: int, classes: int, embedding: int = 64, hidden: int = 256, layers: int = 2) -> MakeNetwork:
    return lambda: LSTM(vocabulary, classes, embedding, hidden, layers)
