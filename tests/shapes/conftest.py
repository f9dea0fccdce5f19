"""Fixtures of the tests of shapes."""

import pytest


@pytest.fixture(autouse=True)
def same_draws_in_any_order(request):
    """Every test of a module begins at the same state of its generator `RNG`, whichever tests ran before."""
    generator = getattr(request.module, "RNG", None)
    state = None if generator is None else generator.bit_generator.state
    yield
    if generator is not None:
        generator.bit_generator.state = state
