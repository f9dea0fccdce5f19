"""How far two ways of computing the same thing may lie apart by rounding alone: tolerances from the method."""

import torch

from mooring.estimates.client_statistics import collect_statistics

EPS = torch.finfo(torch.float64).eps
OPERATIONS = 1000  # roundings in a row, at most, in a client's visit to the small problems here: rows x coefficients


def condition(task, clients):
    """How much larger than the rounding of a gradient the error of a minimiser can be: L/mu of the worst client.

    A loss with kinks has no curvature of its own; its rows' forces, as a share of what holds the model, stand for L.
    """
    facts = collect_statistics(task, clients.cohort(), task.start(), ())
    top = facts.smooth.max() if task.smooth_loss else facts.noise.max() ** 2
    return max(1.0, float(top / facts.convex.min()))


def assert_equal_up_to_rounding(actual, expected, condition, magnified=1.0):
    """`magnified`: what else multiplies rounding, such as one over the step of a finite difference."""
    tolerance = OPERATIONS * EPS * condition * magnified
    scale = float(expected.abs().sum().clamp(min=1))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)
