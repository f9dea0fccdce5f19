"""Generators: federations with planted true models. Frozen dataclasses; `make(seed)` returns `Clients` with a
`truth`."""

from mooring.data.generators.bag_of_words import BagOfWords
from mooring.data.generators.chebyshev import Chebyshev
from mooring.data.generators.ground_truth import ClassTruth, LinearTruth, LogisticTruth, Truth
from mooring.data.generators.hard_logistic import HardLogistic
from mooring.data.generators.linear_federation import LinearFederation
from mooring.data.generators.linear_kernel import (
    LinearKernel,
    covariate_heterogeneity,
    model_heterogeneity,
    stationarity_setup,
)
from mooring.data.generators.prototypes import Prototypes
from mooring.data.generators.synthetic_classes import SyntheticClasses
from mooring.data.generators.synthetic_logit import SyntheticLogit

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
