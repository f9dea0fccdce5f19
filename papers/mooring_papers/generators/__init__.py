"""Generators: federations with planted true models. Frozen dataclasses; `make(seed)` returns `Clients` with a
`truth`."""

from mooring_papers.generators.bag_of_words import BagOfWords
from mooring_papers.generators.chebyshev import Chebyshev
from mooring_papers.generators.ground_truth import ClassTruth, LinearTruth, LogisticTruth, Truth
from mooring_papers.generators.hard_logistic import HardLogistic
from mooring_papers.generators.linear_federation import LinearFederation
from mooring_papers.generators.linear_kernel import (
    LinearKernel,
    covariate_heterogeneity,
    model_heterogeneity,
    stationarity_setup,
)
from mooring_papers.generators.prototypes import Prototypes
from mooring_papers.generators.synthetic_classes import SyntheticClasses
from mooring_papers.generators.synthetic_logit import SyntheticLogit

__all__ = [
    "BagOfWords",
    "Chebyshev",
    "ClassTruth",
    "HardLogistic",
    "LinearFederation",
    "LinearKernel",
    "LinearTruth",
    "LogisticTruth",
    "Prototypes",
    "SyntheticClasses",
    "SyntheticLogit",
    "Truth",
    "covariate_heterogeneity",
    "model_heterogeneity",
    "stationarity_setup",
]
