"""The contents of the README: the output of its command and of its Python lines, and images of the report.

    python -m benchmarks.readme [--write]

With --write the outputs are written to README.md between their marks, and images to docs/images: the top of the report
and its picture of the clients (they need Chromium).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mooring.report.html_report import write_report

ROOT = Path(__file__).parent.parent
README, IMAGES = ROOT / "README.md", ROOT / "docs" / "images"
COMMAND = ["mooring", "advise", "flights", "--out", "runs/flights"]
SIZE = {"width": 1180, "height": 820}
RUN = Path("runs") / "flights"


def terminal_output(folder: Path) -> str:
    """Return the output of the command at 80 columns."""
    command = [sys.executable, "-c", "from mooring.cli import main; main()", *COMMAND[1:], "--quiet"]
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in process.stdout.splitlines()).strip()


def python_output(folder: Path) -> str:
    """Return the output of the README's Python block."""
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code is not None
    out, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code[1], "README.md", "exec"), {})
    finally:
        os.chdir(before)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip()


def draw_images(run: Path) -> None:
    """Write the images of the top of the report and of its picture of the clients."""
    from playwright.sync_api import sync_playwright

    from tests.support.browser import launched

    page = write_report([run])
    with sync_playwright() as play:
        browser = launched(play)
        view = browser.new_page(viewport=SIZE, color_scheme="light")
        view.goto(page.resolve().as_uri())
        view.wait_for_timeout(500)
        view.screenshot(path=IMAGES / "report.png")
        view.locator('[data-part="mooring"] canvas').first.screenshot(path=IMAGES / "mooring.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outputs = {"terminal": terminal_output(folder), "python": python_output(folder)}
        if not options.write:
            print("\n\n".join(outputs.values()))
            return
        text = README.read_text()
        for part, output in outputs.items():
            begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
            pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.S)
            text = pattern.sub(lambda _, b=begin, e=end, o=output: f"{b}\n```text\n{o}\n```\n{e}", text)
        README.write_text(text)
        draw_images(folder / RUN)


if __name__ == "__main__":
    main()
