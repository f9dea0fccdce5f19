"""SIGKILL at any moment of a real federation: the same commands again end with the same models."""

import itertools
import random
import time

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

from tests.engines.processes import (
    LONG,
    Command,
    Federation,
    assert_models_are_the_simulators,
    commands_of,
    run_file,
    wait_until,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),  # Flower's own
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def check_end(federation, name, rounds, seconds=LONG):
    """The run ends, the models are right, and no round but the one that was cut is done twice."""
    federation.check_end(seconds)
    assert_models_are_the_simulators(federation.path, federation.out, federation.place)
    told = [rounds for rounds in federation.rounds_told(name) if rounds]
    for before, after in itertools.pairwise(told):
        assert after[0] in (before[-1], before[-1] + 1) or before[-1] == rounds
    assert {t for rounds in told for t in rounds} == set(range(1, rounds + 1))


def test_a_client_and_the_superlink_are_killed(tmp_path):
    """Each once, in the middle; nothing is left running."""
    path, folder = run_file(tmp_path, "apfl", rounds=5, clients=2)
    with Federation(tmp_path, path, folder) as here:
        wait_until(lambda: here.saved() >= 1)
        here.kill("site 1")
        here.again()
        before = here.saved()
        wait_until(lambda: here.saved() > before or here.alive["server"].poll() is not None)
        here.kill("superlink")
        assert here.alive["server"].poll() not in (0, None)
        assert "Flower has ended" in here.said("server")
        here.again()
        check_end(here, "apfl", 5)
        for name in here.names:
            assert here.alive[name].wait(60) == 0, here.said(name)
    wait_until(lambda: commands_of(tmp_path) == {})  # what a killed SuperLink had begun notices by itself


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "superlink", "client", "all"])
def test_ten_kills_change_nothing(victim, tmp_path):
    """Ten random moments in one run, from the first second on; the commands are those of the command line."""
    rounds, rng = 14, random.Random(victim)
    path, folder = run_file(tmp_path, "apfl", rounds=rounds, clients=3)
    with Federation(tmp_path, path, folder, kind=Command) as here:
        for kill in range(10):
            target = min(here.saved() + (kill > 0), rounds - 2)  # one round or more has gone since the last kill
            wait_until(lambda target=target: here.saved() >= target or here.alive["server"].poll() is not None)
            time.sleep(rng.uniform(0, 8))
            before = here.saved()
            here.kill(rng.choice(here.names) if victim == "client" else victim)
            here.again()
            assert here.saved() >= before
        check_end(here, "apfl", rounds)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "client"])
def test_kills_with_flowers_own_nodes(victim, tmp_path):
    path, folder = run_file(tmp_path, "apfl", rounds=4, clients=2)
    with Federation(tmp_path, path, folder, kind=Command, embedded=False) as here:
        wait_until(lambda: here.saved() >= 1, 2 * LONG)
        here.kill(here.names[0] if victim == "client" else victim)
        here.again()
        check_end(here, "apfl", 4, 3 * LONG)
