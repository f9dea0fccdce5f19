"""The terminal: sentences, notes, progress, and tables that fit its width without cutting a number.

Everything is written to stderr if stdout is used for JSON. Text that comes from data (names of clients, columns, files)
is shown as plain text: no markup, no control characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mooring.core.process import is_quiet, is_verbose, replace_control_characters
from mooring.core.types import JsonObject, OnProgress

MAX_UNWRAPPED_WIDTH = 22  # a column whose cells are no longer than this is never wrapped
MIN_NAME_WIDTH = 8  # minimal width of a shortened name
MIN_PROSE_WIDTH = 24  # minimal width of a column of sentences
MAX_NUMBER_WIDTH = 30  # a longer word with digits is not a number
MAX_NAME_WIDTH = 40  # maximal width of a name


class Display:
    """The console of all output; `json` mode leaves stdout free."""

    def __init__(self, json: bool = False):
        self.json = json
        self.out = Console(file=sys.stderr if json else sys.stdout, highlight=False, emoji=False, markup=False)
        self.err = Console(stderr=True, highlight=False, emoji=False, markup=False)

    def print_line(self, text: str) -> None:
        self.out.print(replace_control_characters(text), soft_wrap=True)

    def paragraph(self, text: str, indent: int = 2) -> None:
        """Print sentences, wrapped to the width."""
        self.out.print(Text(self._wrap(text, indent)), soft_wrap=True)

    def _wrap(self, text: str, indent: int) -> str:
        blank = " " * indent
        return fill(
            replace_control_characters(text),
            self.out.width,
            initial_indent=blank,
            subsequent_indent=blank,
            break_on_hyphens=False,
        )

    def heading(self, text: str) -> None:
        self.out.print(Text(replace_control_characters(text), style="bold"), soft_wrap=True)
        self.out.print()

    def notes(self, notes: Sequence[str]) -> None:
        for note in () if is_quiet() else notes:
            text = replace_control_characters(f"note: {note}")
            self.err.print(text, style="dim", soft_wrap=not self.err.is_terminal)

    def table(
        self,
        title: str,
        rows: Sequence[JsonObject],
        columns: dict[str, str],
        caption: str = "",
        *,
        spare: Sequence[str | tuple[str, ...]] = (),
        shorter: Mapping[str, str] | None = None,
        indent: int = 0,
    ) -> None:
        """Print rows as a table; `columns` maps a key to its heading.

        Where the width is short, sentences are wrapped, then the columns in `spare` are left out from the first on,
        several together where they are a tuple (or replaced, where `shorter` names another column), then names are
        shortened, and finally each row is shown in separate lines. Numbers are never cut, and names only when no
        number can be left out.
        """
        shorter, width = shorter or {}, self.out.width - indent
        kept_keys, left_out = [key for key in columns if key not in shorter.values()], []
        parts = {
            key: TableColumn(
                format_cell(heading),
                [format_cell(row.get(key)) for row in rows],
                k == 0,
                key in {*shorter, *shorter.values()},
            )
            for k, (key, heading) in enumerate(columns.items())
        }
        first = next(iter(columns))
        parts[first] = parts[first]._replace(cells=[shorten_name(cell, MAX_NAME_WIDTH) for cell in parts[first].cells])
        for group in spare:
            if measure_min_width([parts[k] for k in kept_keys], whole_names=True) <= width:
                break
            for key in [key for key in ((group,) if isinstance(group, str) else group) if key in kept_keys]:
                if key in shorter:
                    kept_keys[kept_keys.index(key)] = shorter[key]
                    left_out.append(f"interval {columns[key]}")
                else:
                    kept_keys.remove(key)
                    left_out.append(columns[key])
        if left_out:
            before = "" if not caption else " " if caption.endswith(".") else ". "
            caption += f"{before}Left out at this width: {', '.join(left_out)}."
        if title:
            self.out.print(Text(replace_control_characters(title), style="bold"))
        shown_parts = [parts[key] for key in kept_keys]
        if measure_min_width(shown_parts) <= width:
            self.out.print(Padding(draw_table(shown_parts, width), (0, 0, 0, indent), expand=False))
        else:
            for k in range(len(rows)):
                self.out.print(*stack_row(shown_parts, k, self.out.width), sep="\n")
        if caption:
            self.out.print(Text(self._wrap(caption, indent), style="dim"), soft_wrap=True)
        self.out.print()

    @contextmanager
    def progress(self) -> Iterator[OnProgress]:
        """Show a bar per job and yield the function that updates it; in verbose mode, print a line per step."""
        if is_verbose():
            yield self._step_by_step()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        description = TextColumn("{task.description}", markup=False)
        columns = (description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        off = is_quiet() or not self.err.is_terminal
        with Progress(*columns, console=self.err, transient=True, disable=off) as bar:
            jobs: dict[str, TaskID] = {}

            def update_bar(label: str, done: int, rounds: int) -> None:
                name, _, detail = label.partition(": ")
                if name not in jobs:
                    jobs[name] = bar.add_task("", total=rounds)
                bar.update(jobs[name], completed=done, total=rounds, description=replace_control_characters(label))
                if detail and not self.err.is_terminal:
                    self.err.print(replace_control_characters(f"{label} ({done} of {rounds})"), soft_wrap=True)

            yield update_bar

    def _step_by_step(self) -> OnProgress:
        started_at = time.monotonic()

        def print_step(label: str, done: int, rounds: int) -> None:
            self.err.print(
                replace_control_characters(f"{time.monotonic() - started_at:.1f} s: {label}, {done} of {rounds}"),
                soft_wrap=True,
            )

        return print_step


class TableColumn(NamedTuple):
    """A heading and the cells below it, as text."""

    heading: str
    cells: list[str]
    names: bool = False  # whether it is the first column, with the rows' names
    unwrapped: bool = False  # whether its cells are never wrapped

    @property
    def numbers(self) -> bool:
        return all(is_number(cell) for cell in self.cells)

    @property
    def prose(self) -> bool:
        """Sentences, which may be wrapped."""
        if self.unwrapped or self.numbers:
            return False
        return any(cell_len(cell) > MAX_UNWRAPPED_WIDTH and " " in cell for cell in self.cells)

    @property
    def width(self) -> int:
        return max(map(cell_len, [self.heading, *self.cells]))

    @property
    def min_width(self) -> int:
        """The width below which a number would be cut, or a name or a sentence could not be read."""
        if self.numbers or self.unwrapped or not (self.prose or self.names or self.width > MAX_UNWRAPPED_WIDTH):
            return self.width
        min_width = min(self.width, MIN_PROSE_WIDTH if self.prose else MIN_NAME_WIDTH)
        words_in_cells = [text for cell in self.cells for text in cell.split()] if self.prose else []
        numbers = [
            cell_len(text) for text in words_in_cells if any(map(str.isdigit, text)) and len(text) <= MAX_NUMBER_WIDTH
        ]
        return max([min_width, cell_len(self.heading), *numbers])


def measure_min_width(columns: Sequence[TableColumn], gap: int = 1, whole_names: bool = False) -> int:
    """Return the minimal width of a table; with `whole_names` the names are not shortened."""
    wide = [
        column.width if whole_names and column.names and not column.prose else column.min_width for column in columns
    ]
    return sum(wide) + gap * (len(columns) - 1)


def assign_widths(columns: Sequence[TableColumn], width: int, gap: int) -> list[int]:
    """Return the width of each column: its minimum, then names up to their full width, and sentences share the
    remainder."""
    widths, spare = [column.min_width for column in columns], width - measure_min_width(columns, gap)
    wordy = [k for k, column in enumerate(columns) if column.prose]
    for k, column in enumerate(columns):
        extra = 0 if k in wordy else min(spare, column.width - widths[k])
        widths[k], spare = widths[k] + extra, spare - extra
    while spare > 0 and (narrow := [k for k in wordy if widths[k] < columns[k].width]):
        for k in narrow[:spare]:
            widths[k], spare = widths[k] + 1, spare - 1
    return widths


def draw_table(columns: Sequence[TableColumn], width: int) -> Table:
    fits = measure_min_width(columns, 1, whole_names=True) <= width  # then names are not shortened for a wider gap
    gap = 2 if measure_min_width(columns, 2, whole_names=fits) <= width else 1  # one blank is the box's own
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    sizes = assign_widths(columns, width, gap)
    for k, (column, size) in enumerate(zip(columns, sizes)):
        justify: Literal["left", "right"] = "right" if column.numbers and k else "left"
        table.add_column(Text(column.heading), justify=justify, width=size, overflow="fold", no_wrap=not column.prose)
    for row in zip(*(column.cells for column in columns)):
        cells = (cell if c.prose else shorten_name(cell, size) for cell, c, size in zip(row, columns, sizes))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def stack_row(columns: Sequence[TableColumn], row: int, width: int) -> Iterator[RenderableType]:
    """Yield a row in separate lines: the first cell, then heading and cell of the others; sentences separately."""
    yield Text(f"{columns[0].cells[row] or '-'}:")
    line = ""
    for column in columns[1:]:
        pair = f"{column.heading} {column.cells[row]}".strip()
        if line and (column.prose or cell_len(line) + cell_len(pair) + 4 > width):
            yield Text(f"  {line}")
            line = ""
        if column.prose:
            yield Padding(Text(pair), (0, 0, 0, 2))
        else:
            line = f"{line}  {pair}".strip()
    if line:
        yield Text(f"  {line}")


def shorten_name(name: str, width: int) -> str:
    """Return a name without its middle if it is too long, so that names with equal beginnings differ."""
    if cell_len(name) <= width:
        return name
    tail = (width - 1) // 2
    end = next(name[k:] for k in range(len(name)) if cell_len(name[k:]) <= tail)
    return set_cell_size(name, width - 1 - cell_len(end)) + "…" + end


def format_cell(value: object) -> str:
    """Return a cell's text: about four digits for numbers, whole ones with separators, a dash for a missing value."""
    value = value.item() if hasattr(value, "item") else value  # numpy's numbers as Python's
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        size = abs(value)
        if size in (0, float("inf")) or size < 1e4:
            return f"{value:.4g}"
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3e}"
    if isinstance(value, int):
        return f"{value:,}"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return replace_control_characters(text).replace("\n", " ")


def is_number(text: str) -> bool:
    """Return whether a cell is a number or a missing one."""
    try:
        float(text.strip("%±()[]:;,").replace(",", ""))
    except ValueError:
        return text in ("-", "")
    return True
