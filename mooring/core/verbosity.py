"""How much a command tells beside its answer."""

LEVEL = ["normal"]  # or "quiet": no notes and no progress, or "verbose": every step as a line
