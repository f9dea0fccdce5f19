import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.shapes.quantiles import (
    BIN_WIDTH,
    BINS,
    LINEAR_WIDTH,
    MAX_ABSOLUTE_VALUE,
    bin_values,
    count_values,
)

RNG = np.random.default_rng(0)
DRAWS = {
    "normal": RNG.standard_normal(4000),
    "skewed": RNG.lognormal(sigma=1.5, size=4000),
    "heavy tails": RNG.standard_cauchy(4000),
    "counts": RNG.poisson(3, 4000).astype(float),
}


@pytest.mark.parametrize("name", DRAWS)
def test_rows_are_counted_in_a_bin_whose_middle_is_near(name):
    x = (DRAWS[name] - DRAWS[name].mean()) / DRAWS[name].std()
    middles = np.repeat(bin_values(), count_values(x[:, None])[0])
    assert (np.abs(middles - np.sort(x)) <= BIN_WIDTH * np.hypot(np.sort(x), LINEAR_WIDTH)).all()


def test_counts_of_clients_add_up_to_those_of_the_pooled_rows():
    x = RNG.standard_normal((500, 3))
    parts = sum(count_values(part) for part in np.split(x, [3, 120, 121]))
    assert (parts == count_values(x)).all() and (count_values(x).sum(1) == 500).all()


def test_every_bin_holds_its_middle_and_far_values_are_in_the_last():
    values = bin_values()
    assert (count_values(values[:, None]) == 1).all() and len(values) == BINS
    assert values[BINS // 2] == pytest.approx(0, abs=1e-12) and values[-1] == pytest.approx(
        MAX_ABSOLUTE_VALUE, rel=BIN_WIDTH
    )
    far = count_values(np.array([[1e300], [-1e300]]))[0]
    assert far[0] == far[-1] == 1


def test_missing_values_are_refused():
    with pytest.raises(RequestError, match="must be finite"):
        count_values(np.array([[np.nan]]))
