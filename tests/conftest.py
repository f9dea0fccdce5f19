"""One thread for all tests: the problems are tiny, and the sums come out the same everywhere."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def a_user_of_its_own(tmp_path_factory):
    """What the tests give on command lines is not remembered for whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
