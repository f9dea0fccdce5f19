"""The options of `fit`, `compare` and `advise` in Python, for type checkers; None means unset.

This file is written by `python -m tools.option_types > mooring/runs/option_types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

from mooring.core.types import NamedValues


class Options(TypedDict, total=False):
    """The options of `fit` and `compare`."""

    client: str | None
    target: str | None
    formula: str | None
    target_type: Literal["auto", "regression", "binary", "classes", "count"] | None
    features: Sequence[str] | None
    drop: Sequence[str] | None
    group: str | None
    time_column: str | None
    split: str | Sequence[float] | None
    decimal: Literal[".", ","] | None
    date_format: str | None
    encoding: str | None
    na: Sequence[str] | None
    sheet: str | int | None
    header_row: int | None
    categorical: Sequence[str] | None
    allow: Sequence[str] | None
    drop_repeats: bool | None
    merge_levels: Sequence[str] | None
    winsorize: float | str | None
    min_rows: int | None
    drop_small: bool | None
    drop_missing_target: bool | None
    split_seed: int | None
    min_category_rows: int | None
    partition: NamedValues | None
    data_dir: str | None
    task: str | NamedValues | None
    loss: str | Callable[..., object] | None
    rounds: int | None
    participation: int | float | None
    weights: str | Mapping[str, float] | None
    baselines: bool | None
    seed: int | None
    seeds: int | None
    evaluate_every: int | None
    patience: int | None
    checkpoint: Literal["best", "last"] | None
    select_by: str | None
    checkpoint_every: int | None
    threads: int | None
    device: str | None
    chunk: int | None
    kernels: Literal["auto", "torch", "numba"] | None
    average: str | None
    clip: float | None
    noise: float | None
    delta: float | None
    weight_cap: float | None
    attack: str | None


class AdviceOptions(Options, total=False):
    """Those of `advise`."""

    margin: float | str | None
    level: float | str | None
    folds: int | None
    shape: Literal["auto", "linear", "spline", "boosted"] | None
    theory: bool | None
