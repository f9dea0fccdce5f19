"""The options of `load` and `check`: roles of columns, formats of cells, and cleaning of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from mooring.core.errors import RequestError
from mooring.core.types import NamedValues
from mooring.data.cell_formats import CellFormat
from mooring.data.character_encoding import require_encoding
from mooring.data.column_types import CATEGORY
from mooring.data.file_readers import CellReading
from mooring.data.formula_parser import parse_formula
from mooring.data.schema import Schema
from mooring.data.schema_server import SchemaPlan
from mooring.data.tables import suggest_name


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options by name; None and () mean unset."""

    formula: str | None = None  # such as "score ~ lrt + (1 | school)": target, columns and client
    client: str | None = None  # column that identifies the client
    target: str | None = None  # column to predict
    target_type: str = "auto"  # kind of the target: "regression", "binary", "classes", "count" or "auto"
    features: Sequence[str] | None = None  # columns to learn from (default: all but useless ones)
    drop: Sequence[str] | None = None  # columns to leave out
    group: str | None = None  # column whose equal values stay in one part
    time_column: str | None = None  # column by which the earliest rows train and the latest test
    split: str | Sequence[float] | None = (
        None  # column with train, validation, test (default: `split`), or three shares
    )
    min_rows: int = 5  # smaller clients are an error, or are left out (`drop_small`)
    drop_small: bool = False
    weights: str | None = None  # column with each client's weight, the same in all its rows
    drop_missing_target: bool = False  # leave rows without a target out
    min_category_rows: int = 1  # categories with fewer training rows over all clients count as "other"
    seed: int = 0
    decimal: str | None = None  # "." or ","; None: detected by column
    date_format: str | None = None  # such as "%d.%m.%Y"; None: detected
    encoding: str | None = None  # of a CSV file, such as "cp1250"; None: detected
    na: Sequence[str] = ()  # further texts that stand for a missing value
    sheet: str | int | None = None  # of a workbook
    header_row: int | None = None  # of a sheet or CSV file, from 1
    categorical: Sequence[str] = ()  # columns that are read as categories
    allow: Sequence[str] = ()  # columns that may predict the target almost perfectly
    drop_repeats: bool = False  # leave rows out that repeat an earlier one
    merge_levels: Sequence[str] | Mapping[str, str] = ()  # "suny=sunny"
    refuse_leaks: bool = False  # whether a column that predicts the target almost perfectly is an error
    winsorize: float | None = None  # share of a column's lowest and of its highest numbers that are clipped

    @classmethod
    def make(cls, arguments: NamedValues) -> LoadOptions:
        """Return the options; an unknown name is refused."""
        names = [field.name for field in fields(cls)]
        unknown = next((name for name in arguments if name not in names), None)
        if unknown is not None:
            raise RequestError(f"unknown option '{unknown}' of a table.{suggest_name(unknown, names)}")
        options = cls(**{name: value for name, value in arguments.items() if value is not None}).follow_formula()
        if options.decimal not in (None, ".", ","):
            raise RequestError(f"decimal must be '.' or ',', got {options.decimal!r}.")
        if options.encoding is not None:
            require_encoding(options.encoding)
        return options

    def follow_formula(self) -> LoadOptions:
        """Return the options with the target and the client's column of a formula."""
        if self.formula is None:
            return self
        if self.features or self.drop:
            raise RequestError("a formula names the columns to learn from; leave --features and --drop out.")
        if self.winsorize:
            raise RequestError("--winsorize does not apply to the columns of a formula.")
        parts = parse_formula(self.formula)
        for role, given_name, formula_name in (
            ("target", self.target, parts.target),
            ("client", self.client, parts.client),
        ):
            if None not in (given_name, formula_name) and given_name != formula_name:
                raise RequestError(
                    f"the {role} column is given twice: '{given_name}', and '{formula_name}' by the formula."
                )
        return replace(self, target=parts.target, client=parts.client or self.client)

    def reading(self, schema: Schema | None = None) -> CellReading:
        """Return the formats of a table's cells; with an earlier run's `schema`, those of that run."""
        return CellReading(
            text=frozenset(text_columns(schema)),
            names=frozenset(client_name_columns(self.client, schema)),
            categorical=frozenset(self.categorical),
            decimal=self.decimal or "",
            decimal_hint=schema.decimal if schema else "",
            date_format=self.date_format or "",
            encoding=self.encoding or "",
            encoding_hint=schema.encoding if schema else "",
            na=(*self.na, *(schema.na if schema else ())),
            sheet="" if self.sheet is None else str(self.sheet),
            header_row=self.header_row,
            formats=tuple((name, CellFormat(*form)) for name, form in schema.formats.items()) if schema else (),
        )


def text_columns(schema: Schema | SchemaPlan | None) -> set[str]:
    """Return the columns that are read as text: the categories of a schema, or of its plan."""
    if schema is None:
        return set()
    levels = schema.formula.levels if isinstance(schema, Schema) and schema.formula is not None else {}
    return {*levels, *(column.name for column in schema.columns if column.kind == CATEGORY and not column.part)}


def client_name_columns(client: str | None, schema: Schema | None) -> set[str]:
    """Return the columns of a file that may contain the clients' names."""
    return {name for name in (client, "client", schema.client if schema else None) if name is not None}
