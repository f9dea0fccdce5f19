"""The page on the commands: python -m tools.papers_commands > papers/docs/commands.md"""

import sys
from importlib import import_module

from tools.reference_pages import format_commands

HEADER = """# Commands of the papers

`pip install 'mooring-fl[papers]'` adds these commands; `mooring COMMAND --help` prints the same.

This page is written by `python -m tools.papers_commands > papers/docs/commands.md`.
"""


def format_page() -> str:
    import_module("mooring_papers.commands")  # adds them
    return format_commands("mooring_papers", HEADER)


if __name__ == "__main__":
    sys.stdout.write(format_page())
