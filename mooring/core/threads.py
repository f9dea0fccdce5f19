"""Independent work side by side: one Python thread each, and PyTorch alone in it.

Cohorts of small models keep the threads of PyTorch waiting for each other at every operation; chunks of clients have
nothing to wait for. PyTorch lets other Python threads run while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """[work(item) for each], on as many threads as PyTorch may use. A lone item has them all to itself."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(items)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
