"""Client-level differential privacy: clip each client's message, add Gaussian noise to the sum, count the privacy loss.

    mean_t    =  sum_i a_i clip(x_i)  +  noise * clip * max_i a_i * N(0, I)        a_i: shares of the cohort's clients
    epsilon   of n Gaussian releases at `noise` is that of one at noise / sqrt(n), exactly; n: how often the client that
              took part most often took part

It bounds what the sequence of global models reveals about any one client's rows, against an attacker that knows all
else: the other clients' rows, the shares, and the participants of each round (so no gain is claimed from sampling). The
server is trusted: it sees single messages, clips them and draws the noise. docs/privacy.md states what is not covered.

The cost is written to the ledger before a mean is used. The noise is a function of a key that is drawn for each run and
of the clipped messages: a round that is computed again after a crash with the same messages gives the same sum, which
reveals nothing new and costs nothing; with any other message the noise is fresh, and the ledger counts again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mooring.core.aggregation import flatten_messages, unflatten_message
from mooring.core.cohort import StateTree
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.engines.reply_checks import clip_messages
from mooring.runs.atomic_files import json_bytes as sealed_json
from mooring.runs.atomic_files import read_json, sync_directory, temporary_path, write_error, write_json

if TYPE_CHECKING:
    from mooring.engines.training_state import TrainingPlan

LEDGER_FILE, NOISE_KEY_FILE = "privacy.json", "noise.key"
DEFAULT_DELTA = 1e-5  # unless it is set


def compute_epsilon(noise: float, releases: int, delta: float) -> float:
    """Return the epsilon at `delta` of this number of releases with Gaussian noise of `noise` sensitivities."""
    if not releases:
        return 0.0
    if importlib.util.find_spec("dp_accounting") is None:
        raise RequestError("noise is accounted for by the package dp-accounting; install it, or mooring-fl[privacy].")
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / math.sqrt(releases), delta))


def make_private_mean(plan: TrainingPlan, clients: int, directory: Path | None = None) -> PrivateMean | None:
    """Return the private mean of a plan with noise; None without noise."""
    if plan.noise is None or plan.clip is None:
        return None
    return PrivateMean(plan.noise, plan.clip, plan.delta or DEFAULT_DELTA, clients, directory)


class PrivateMean:
    """The private mean of each round, and the ledger: in memory, or in a run's directory."""

    def __init__(self, noise: float, clip: float, delta: float, clients: int, directory: Path | None = None):
        self.noise, self.clip, self.delta, self.directory = noise, clip, delta, directory
        self.key = secrets.token_bytes(32)
        self.taken = np.zeros(clients, dtype=np.int64)  # number of releases with each client
        self.entries: list[JsonObject] = []
        compute_epsilon(noise, 1, delta)  # fails at once if it cannot be computed
        if directory is not None:
            self._open(directory)

    @property
    def epsilon(self) -> float:
        return compute_epsilon(self.noise, int(self.taken.max(initial=0)), self.delta)

    def mean(self, message: StateTree, clients: Tensor, cohort: Tensor, p: Tensor, t: int) -> StateTree:
        """The noisy sum of the clipped messages of these `clients`, with shares p / sum p of the entire cohort."""
        share = p.double() / p.double().sum()
        shares = share[torch.isin(cohort, clients)]
        safe = flatten_messages(clip_messages(message, self.clip))
        total = (shares[:, None] * safe.double()).sum(0)
        digest = hashlib.blake2b(key=self.key, digest_size=32)
        digest.update(f"{t} {safe.dtype} {tuple(safe.shape)}".encode())
        for part in (safe, shares, cohort):
            digest.update(part.contiguous().numpy().tobytes())
        self._enter(t, digest.hexdigest(), cohort)
        sigma = self.noise * self.clip * float(share.max())
        return unflatten_message(total + sigma * draw_normals(self.key + digest.digest(), len(total)), message)

    def _enter(self, t: int, digest: str, cohort: Tensor) -> None:
        """Record a release before it happens; a repeated one does not count."""
        if any(entry["digest"] == digest for entry in self.entries):
            return
        self.taken[cohort.numpy()] += 1
        self.entries.append({"round": t, "digest": digest, "cohort": len(cohort), "epsilon": self.epsilon})
        if self.directory is not None:
            write_json(
                self.directory / LEDGER_FILE,
                {"noise": self.noise, "clip": self.clip, "delta": self.delta}
                | {"epsilon": self.epsilon, "taken": self.taken, "releases": self.entries},
            )

    def _open(self, directory: Path) -> None:
        if (directory / LEDGER_FILE).exists():
            ledger = read_json(directory / LEDGER_FILE)
            self.taken, self.entries = np.array(ledger["taken"], dtype=np.int64), ledger["releases"]
        if (directory / NOISE_KEY_FILE).exists():
            self.key = bytes.fromhex(read_json(directory / NOISE_KEY_FILE)["key"])
        else:
            write_secret(directory / NOISE_KEY_FILE, {"key": self.key.hex()})


def draw_normals(key: bytes, count: int) -> Tensor:
    """[count] independent standard normal numbers, an unpredictable function of the key (SHAKE-256)."""
    pairs = (count + 1) // 2
    integers = np.frombuffer(hashlib.shake_256(key).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
    u, angle = ((integers >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2 * np.log(u))
    normals = np.concatenate([radius * np.cos(2 * np.pi * angle), radius * np.sin(2 * np.pi * angle)])
    return torch.from_numpy(normals[:count])


def write_secret(path: Path, value: JsonObject) -> None:
    """Write a sealed file that only its owner may read, atomically."""
    temp = temporary_path(path.parent)
    try:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, sealed_json(value))
            os.fsync(handle)
        finally:
            os.close(handle)
        os.rename(temp, path)
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
