"""Every algorithm stands every odd client: finite models, or one sentence that names the client."""

from dataclasses import dataclass, fields, replace

import pytest

from mooring.algorithms.base import algorithm_names, build, find
from mooring.algorithms.fedavg import FedAvg
from mooring.testing import FINITE, REFUSED, cases, check_federated
from tests.algorithms.cases import TABLE_FIELDS


def plainly(name):
    """The algorithm with a stiffness of its own, where it would estimate one: that is tested by itself."""
    own = {"lam": 0.3} if "lam" in {field.name for field in fields(find(name))} else {}
    return build(name, own | TABLE_FIELDS.get(name, {}))


def test_there_are_many_odd_clients():
    assert len({case.name for case in cases()}) >= 40


SHORT = {"fedprox_two_stage": {"final_steps": 50}}  # by default up to 10,000; the long trials take those
SHARE = 8  # a short run tries every eighth case; together the algorithms try them all


@pytest.mark.parametrize("place,name", list(enumerate(algorithm_names())))
def test_every_algorithm_stands_some_of_them(place, name):
    algorithm = replace(plainly(name), **SHORT.get(name, {}))
    assert check_federated(algorithm, slice(place % SHARE, None, SHARE))


@pytest.mark.slow
@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_stands_them(name):
    found = check_federated(plainly(name))
    outcome = {FINITE: 0, REFUSED: 0}
    for verdict in found:
        outcome[verdict.outcome] += 1
        assert "\n" not in verdict.sentence.strip() or verdict.case.startswith("a name")
    assert outcome[FINITE] > 20 and outcome[REFUSED] > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_stands_them_with_all_its_defaults(name):
    assert check_federated(build(name, TABLE_FIELDS.get(name, {})))


@dataclass(frozen=True)
class Careless(FedAvg):
    """Divides by what may be zero, and forgets the guard's favour of being finite."""

    def personal_model(self, server, client):
        return server.w / (server.w - server.w)


@dataclass(frozen=True)
class Broken(FedAvg):
    def client_update(self, server, client, local):
        if int(local.data.train.size.min()) == 0:
            raise IndexError("no rows")
        return super().client_update(server, client, local)


@pytest.mark.parametrize(
    "algorithm,why", [(Careless(), "where nobody is odd: Diverged"), (Broken(), "IndexError: no rows")]
)
def test_a_careless_algorithm_fails(algorithm, why):
    with pytest.raises(AssertionError, match=why):
        check_federated(algorithm)
