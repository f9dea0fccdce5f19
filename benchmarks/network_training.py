"""Networks that people train, against plain loops of torch that do the same.

    python -m benchmarks.network_training resnet --data-dir DATA         (cifar10_25k.npz)
    python -m benchmarks.network_training transformer --data-dir DATA    (airline_tweets.npz)

resnet       ResNet-18 with batch normalization on 10 clients with a few images of CIFAR-10 each: CPU time of a round
             against a plain loop of FedAvg (median over rounds, both in turn), whether a run that was interrupted
             and resumed has the same bytes, and whether an exported network predicts what the run predicts.
transformer  A one-layer Transformer on 20 clients' tweets (rows sorted by airline and user, cut into 20 blocks):
             test accuracy of the global model by FedAvg with AdamW, by a plain loop of FedAvg with AdamW, and by
             FedAvg with SGD, whose step size is the best of a grid on the test rows.
"""

import argparse
import contextlib
import copy
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor, nn

import mooring
from mooring.engines.callbacks import Callback
from mooring.engines.export import as_torch

CLIENTS, IMAGES, BATCH, ETA, ROUNDS = 10, 20, 10, 0.05, 5
TWEET_CLIENTS, TWEET_ROUNDS, TWEET_BATCH, TWEET_ETA, SGD_GRID = 20, 8, 32, 1e-3, (0.03, 0.1, 0.3)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        same = stride == 1 and width == out
        shortcut = (nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 with the usual stem and ten classes: 11.2 million parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for a, b, stride in widths for block in (Block(a, b, stride), Block(b, b, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Encoder(nn.Module):
    """Embeddings, one Transformer layer, the mean over tokens, three classes."""

    def __init__(self, words: int = 4000, width: int = 64, length: int = 32):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Parameter(torch.zeros(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        empty = ids == 0
        empty[:, 0] = False
        z = self.layer(self.words(ids) + self.places, src_key_padding_mask=empty)
        kept = (~empty)[..., None].to(z.dtype)
        return self.head((z * kept).sum(1) / kept.sum(1))


def run_loop(net: nn.Module, data: list, rounds: int, batch: int, make_optimizer, on_round=None) -> nn.Module:
    """FedAvg as a loop of torch: each client trains the global network for an epoch, weights by rows."""
    generator = torch.Generator().manual_seed(0)
    total = sum(len(y) for _, y in data)
    local = copy.deepcopy(net)
    for _ in range(rounds):
        begin = time.process_time()
        start = copy.deepcopy(net.state_dict())
        mean = {name: torch.zeros_like(part, dtype=torch.float64) for name, part in start.items()}
        for x, y in data:
            local.load_state_dict(start)
            optimizer = make_optimizer(local.parameters())
            local.train()
            for rows in torch.randperm(len(y), generator=generator).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(local(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, part in local.state_dict().items():
                mean[name] += len(y) / total * part
        net.load_state_dict({name: part.to(start[name].dtype) for name, part in mean.items()})
        if on_round is not None:
            on_round(time.process_time() - begin)
    return net.eval()


class Clock(Callback):
    """CPU seconds between the ends of two rounds; fails in round `stop`."""

    def __init__(self, stop: int | None = None):
        self.stop, self.last, self.seconds = stop, time.process_time(), []

    def on_round_end(self, training, record):
        self.seconds.append(time.process_time() - self.last)
        if record["round"] == self.stop:
            raise KeyboardInterrupt
        self.last = time.process_time()


def measure_resnet(folder: Path) -> None:
    with np.load(folder / "cifar10_25k.npz") as stored:
        chosen = np.random.default_rng(0).permutation(len(stored["y_train"]))[: CLIENTS * 2 * IMAGES]
        x = torch.from_numpy(stored["x_train"][chosen]).permute(0, 3, 1, 2).float() / 255
        y = torch.from_numpy(stored["y_train"][chosen].astype(np.int64))
    xs, ys = x.split(2 * IMAGES), y.split(2 * IMAGES)
    data = {
        f"client {i}": {
            part: (xs[i][rows], ys[i][rows])
            for part, rows in (("train", slice(IMAGES)), ("validation", slice(IMAGES, -8)), ("test", slice(-8, None)))
        }
        for i in range(CLIENTS)
    }
    torch.manual_seed(0)
    start = resnet18()
    options = {
        "algorithm": "fedavg", "settings": {"eta": ETA, "epochs": 1, "batch": BATCH}, "baselines": False,
        "rounds": ROUNDS, "evaluate_every": ROUNDS, "checkpoint_every": 2, "threads": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        top, clock, seconds = Path(temporary), Clock(), []
        run_loop(copy.deepcopy(start), [(xs[i][:IMAGES], ys[i][:IMAGES]) for i in range(CLIENTS)], ROUNDS, BATCH,
                 lambda p: torch.optim.SGD(p, lr=ETA), seconds.append)  # fmt: skip
        mooring.fit(start, data, callbacks=[clock], **options)
        ours, loop = np.median(clock.seconds[1:-1]), np.median(seconds[1:-1])
        print(f"CPU seconds of a round: {CLIENTS} clients, {IMAGES} images each, batch {BATCH}, median of {ROUNDS - 2}")
        print(f"plain loop {loop:.2f}   Mooring {ours:.2f}   ratio {ours / loop:.2f}")
        result = mooring.fit(start, data, out=top / "whole", **options)
        with contextlib.suppress(KeyboardInterrupt):
            mooring.fit(start, data, out=top / "again", callbacks=[Clock(stop=3)], **options)
        resumed = mooring.resume(top / "again", data=data, model=start)
        files = [(top / name / "models.safetensors").read_bytes() for name in ("whole", "again")]
        equal = all(torch.equal(result.models[name], resumed.models[name]) for name in data)
        print(f"interrupted in round 3 of {ROUNDS} and resumed: same bytes {files[0] == files[1]}, models {equal}")
        net = copy.deepcopy(start)
        net.load_state_dict(load(as_torch(mooring.open(top / "whole", model=start), "client 0")))
        with torch.no_grad():
            probability = torch.softmax(net.eval()(xs[0][-8:]), 1)
        gap = float((probability - torch.as_tensor(result.predict(xs[0][-8:], "client 0"))).abs().max())
        print(f"exported as a state dict of torch: predictions differ by at most {gap:.1e}")


def measure_transformer(folder: Path, rows: int, seeds: int) -> None:
    with np.load(folder / "airline_tweets.npz") as stored:
        order = np.lexsort((stored["user"], stored["airline"]))
        chosen = order[np.linspace(0, len(order) - 1, rows).astype(int)]
        x = torch.from_numpy(stored["tokens"][chosen].astype(np.int64))
        y = torch.from_numpy(stored["y"][chosen].astype(np.int64))
    print(f"{rows} tweets, {TWEET_CLIENTS} clients, {TWEET_ROUNDS} rounds, one epoch of batch {TWEET_BATCH} per round")
    print("seed  loop, AdamW  Mooring, AdamW  Mooring, SGD (best of the grid)")
    table = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for places in torch.arange(rows).chunk(TWEET_CLIENTS):
            places = places[torch.randperm(len(places), generator=generator)]
            parts.append((places[len(places) // 4 :], places[: len(places) // 4]))
        test = torch.cat([held for _, held in parts])
        torch.manual_seed(seed)
        start = Encoder()
        loop = run_loop(copy.deepcopy(start), [(x[train], y[train]) for train, _ in parts], TWEET_ROUNDS, TWEET_BATCH,
                        lambda p: torch.optim.AdamW(p, lr=TWEET_ETA))  # fmt: skip
        data = {
            f"client {i}": {"train": (x[train], y[train]), "validation": (x[held], y[held]), "test": (x[held], y[held])}
            for i, (train, held) in enumerate(parts)
        }

        def accuracy(net: nn.Module, test: Tensor = test) -> float:
            with torch.no_grad():
                return float((net(x[test]).argmax(1) == y[test]).double().mean())

        def train(settings: dict, start: nn.Module = start, data: dict = data, seed: int = seed) -> nn.Module:
            result = mooring.fit(
                start, data, algorithm="fedavg", settings={"epochs": 1, "batch": TWEET_BATCH, **settings},
                rounds=TWEET_ROUNDS, evaluate_every=TWEET_ROUNDS, checkpoint="last", baselines=False, seed=seed,
            )  # fmt: skip
            return result.module()

        # torch's AdamW decays weights by 0.01
        adamw = accuracy(train({"optimizer": "adamw", "eta": TWEET_ETA, "weight_decay": 0.01}))
        plain = max(accuracy(train({"eta": eta})) for eta in SGD_GRID)
        table.append((accuracy(loop), adamw, plain))
        print(f"{seed:4}  {table[-1][0]:11.1%}  {adamw:14.1%}  {plain:12.1%}", flush=True)
    print("mean  {:11.1%}  {:14.1%}  {:12.1%}".format(*np.mean(table, 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("resnet", "transformer"))
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=6000, help="tweets")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "resnet":
        measure_resnet(options.data_dir)
    else:
        measure_transformer(options.data_dir, options.rows, options.seeds)


if __name__ == "__main__":
    main()
