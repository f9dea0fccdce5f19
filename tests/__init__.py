"""Tests; `conftest.py` has what holds for all of them. This file runs before any test imports NumPy and SciPy.

These read their number of threads when they are imported. One thread is enough for tiny problems: more of them wait for
each other in a loop, which takes as much processor time as the tests themselves.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
