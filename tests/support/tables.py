"""Classic tables of schools and districts for tests and benchmarks; they do not come with the package."""

from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent.parent / "data" / "tables"


class Classic(NamedTuple):
    """A table's path, and the options that tell how to read it."""

    path: str
    columns: dict[str, Any]


def classic(name: str, client: str, target: str, drop: str) -> Classic:
    return Classic(
        str(FOLDER / f"{name}.csv"), {"client": client, "target": target, "drop": drop.split(), "drop_small": True}
    )


EXAM = classic("exam", "school", "normexam", "student type")  # a pupil's number; `type` repeats `schgend`
CONTRACEPTION = classic("contraception", "district", "use", "woman")
HSB82 = classic("hsb82", "school", "mAch", "cses")  # cses = ses - meanses
TABLES = {"exam": EXAM, "contraception": CONTRACEPTION, "hsb82": HSB82}
