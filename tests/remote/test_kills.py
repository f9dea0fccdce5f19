"""SIGKILL at any moment of a real federation: the same commands again end with the same models."""

import json
import random
import time
from collections import Counter

import pytest

from tests.remote.processes import FORKS, LONG, Federation, assert_models_are_the_simulators, run_file, wait_until

pytestmark = FORKS


def check_end(federation, name, rounds, kills, seconds=LONG):
    """The run ends, the models are right, and no round but those that were cut is done twice."""
    federation.check_end(seconds)
    assert_models_are_the_simulators(federation.path, federation.out, federation.place)
    lines = [json.loads(line) for line in (federation.place / "audit.jsonl").read_text().splitlines()]
    done = [line["round"] for line in lines if line.get("request") == "local_update"]
    times = Counter(done[: -1 - done[::-1].index(rounds) or None])  # the baseline's rounds come after these
    assert set(times) >= set(range(1, rounds)) and sum(times.values()) - len(times) <= kills + 1


@pytest.mark.processes
def test_a_client_and_the_server_are_killed(tmp_path):
    """Each once, in the middle; nothing is left running."""
    rounds = 40  # many more than end between a look at the run and a kill
    path, folder = run_file(tmp_path, "apfl", rounds=rounds, clients=2)
    with Federation(tmp_path, path, folder) as here:
        wait_until(lambda: here.saved() >= 1)
        here.kill("site 1")
        here.again()
        before = here.saved()
        wait_until(lambda: here.saved() > before or here.alive["server"].poll() is not None)
        here.kill("server")
        here.again()
        check_end(here, "apfl", rounds, 1)
        for name in here.names:
            assert here.alive[name].wait(60) == 0, here.log_text(name)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "client", "all"])
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
        check_end(here, "apfl", rounds, kills)
