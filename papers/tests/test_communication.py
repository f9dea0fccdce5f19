import pytest

from mooring.core.errors import RequestError
from mooring_papers.theory.communication import COMPLEXITIES, rounds_order


def test_the_rows_of_table_1_at_one_point():
    eps, sampled, batch, clients = 0.01, 4, 5, 27
    expected = {
        "fedprox": 1 / (4 * eps**2) + 1000,
        "fedprox non-smooth": 1 / eps**2,
        "fedprox, all clients": 1000,
        "fedprox, gradients (B,0)-similar": 100,
        "fedmspp": 1 / (20 * eps**2) + 1000,
        "fedmspp non-smooth": 1 / eps**2,
        "fedavg": 1 / (20 * eps**2) + 1000 + 100,
        "fedavg, all clients (Yu)": 1 / (5 * 27 * eps**2) + 27 * 5 * 100,
        "fedavg, all clients (Khanduri)": 1000,
        "scaffold": 1 / (20 * eps**2) + (27 / 4) ** (2 / 3) * 100,
        "fedpd": 100,
        "stem": 100,
        "fco": 1 / (5 * 27 * eps**2) + 100,
    }
    assert set(expected) == set(COMPLEXITIES)
    for method, value in expected.items():
        assert rounds_order(method, eps, sampled, batch, clients) == pytest.approx(value), method


def test_which_methods_need_no_similarity_of_clients():
    free = {name for name, row in COMPLEXITIES.items() if row.any_heterogeneity}
    assert free == {
        "fedprox",
        "fedprox non-smooth",
        "fedprox, all clients",
        "fedmspp",
        "fedmspp non-smooth",
        "scaffold",
        "fco",
    }
    assert {name for name, row in COMPLEXITIES.items() if row.non_smooth and row.sampling} == {
        "fedprox non-smooth",
        "fedmspp non-smooth",
    }


@pytest.mark.parametrize("method", sorted(COMPLEXITIES))
def test_more_accuracy_never_costs_fewer_rounds(method):
    orders = [rounds_order(method, eps, 4, 5, 20) for eps in (1e-1, 1e-2, 1e-3)]
    assert orders == sorted(orders)
    assert orders[0] < orders[-1]


def test_the_clients_default_to_the_sampled_ones():
    assert rounds_order("scaffold", 0.1, 5) == rounds_order("scaffold", 0.1, 5, clients=5)


def test_unknown_methods_list_the_known_ones():
    with pytest.raises(RequestError, match=r"known: fedprox, .*scaffold"):
        rounds_order("fedsgd", 0.1)
    with pytest.raises(RequestError, match="accuracy must be > 0"):
        rounds_order("fedprox", 0.0)
