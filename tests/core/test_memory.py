import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
import torch
from mooring.core.process import keep_freed_memory

torch.set_num_threads(1)
x = torch.ones(2**20)
if {keeps}:
    keep_freed_memory()
for k in range(51):
    y = x + k
    del y
    if k == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(keeps: bool) -> int:
    """Page faults of 50 sums of 4 MB, in a process of its own."""
    command = [sys.executable, "-c", COUNT_FAULTS.format(keeps=keeps)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_new_tensor_takes_over_the_memory_of_a_freed_one():
    assert count_page_faults(keeps=True) < 10 * 1024  # 50 times 4 MB are 50 * 1024 pages of 4 kB
