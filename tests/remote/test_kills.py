"""SIGKILL at any moment of a real federation: the same commands again end with the same models."""

import itertools
import random
import time

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

from tests.remote.processes import (
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
    reported = [done for done in federation.reported_rounds(name) if done]
    for before, after in itertools.pairwise(reported):  # a kill may fall between saving a round and reporting it
        assert before[-1] <= after[0] <= before[-1] + 2 or before[-1] == rounds
    missing = set(range(1, rounds + 1)) - {done for run in reported for done in run}
    assert len(missing) < len(reported)


def test_a_client_and_the_superlink_are_killed(tmp_path):
    """Each once, in the middle; nothing is left running."""
    rounds = 40  # many more than end between a look at the run and a kill
    path, folder = run_file(tmp_path, "apfl", rounds=rounds, clients=2)
    with Federation(tmp_path, path, folder) as here:
        wait_until(lambda: here.saved() >= 1)
        here.kill("site 1")
        here.again()
        before = here.saved()
        wait_until(lambda: here.saved() > before or here.alive["server"].poll() is not None)
        here.kill("superlink")
        assert here.alive["server"].poll() not in (0, None)
        assert "Flower has ended" in here.log_text("server")
        here.again()
        check_end(here, "apfl", rounds)
        for name in here.names:
            assert here.alive[name].wait(60) == 0, here.log_text(name)
    wait_until(lambda: commands_of(tmp_path) == {})  # what a killed SuperLink had begun notices by itself


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "app", "superlink", "client", "all"])
def test_ten_kills_change_nothing(victim, tmp_path):
    """The first kill in the first seconds, the others in the middle of rounds that are spread over the run."""
    rounds, kills, rng = 220, 10, random.Random(victim)
    path, folder = run_file(tmp_path, "apfl", rounds=rounds, clients=3)
    with Federation(tmp_path, path, folder) as here:
        for kill in range(kills):
            if kill:
                target = rounds // (kills + 1) * kill + rng.randrange(10)
                wait_until(lambda target=target: here.saved() >= target, pause=0.01)
            time.sleep(rng.uniform(0, 0.1 if kill else 5))
            before = here.saved()
            assert here.alive["server"].poll() is None and before < rounds  # the run is under way
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
