"""`TablePreprocessor`: the preprocessing of tables, as a transformer of scikit-learn's."""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from mooring.core.errors import RequestError
from mooring.data.column_roles import ColumnRoles, client_codes
from mooring.data.loading import read_by_schema
from mooring.data.schema import encode_table
from mooring.data.schema_client import ClientTable, agree_on_schema
from mooring.data.table_sources import read_source, to_pandas
from mooring.data.tables import Table

ROLE = "(target of the preprocessor)"  # a column that no table has


class TablePreprocessor(TransformerMixin, BaseEstimator):
    """Texts, dates and missing cells of a data frame as scaled numbers, by the rules of `mooring advise`.

    Numbers and dates are read in the format in which they are written; categories become one column per level; missing
    cells are filled and flagged; useless columns are left out; every column is centered and scaled.

    Parameters
    ----------
    client : str or None, default=None
        A column that identifies the client: it is passed through unchanged, as the first column.

    Attributes
    ----------
    schema_ : the encoding of the table
    """

    def __init__(self, client: str | None = None):
        self.client = client

    def fit(self, X: object, y: object = None) -> TablePreprocessor:
        """Learn formats, categories, fills and scales from a data frame."""
        frame = self._features(X)
        table = read_source(frame)
        if table.strays:
            raise RequestError(table.strays[0].describe(table.place(int(table.strays[0].rows[0]))))
        names = list(table.frame.columns)
        filled = table.frame.assign(**{ROLE: np.arange(len(frame)) % 2, "client": "all"})
        full_table = Table(filled, table.title)
        code, clients = client_codes(full_table, "client")
        member = ClientTable(
            full_table, ColumnRoles("client", ROLE), code, clients, names, "binary", 0, (1.0, 0.0, 0.0)
        )
        schema, _, _ = agree_on_schema([member], title=table.title)
        formats = {name: tuple(form) for name, form in table.formats.items()}
        self.schema_ = schema.model_copy(update={"formats": formats, "client": None})
        self.feature_names_in_ = np.array(self._frame(X).columns, dtype=object)
        self.n_features_in_ = len(self.feature_names_in_)
        return self

    def transform(self, X: object) -> pd.DataFrame:
        """Return the table as numbers, after the client column if there is one."""
        check_is_fitted(self)
        table = read_by_schema(self._features(X), self.schema_)
        values, _ = encode_table(table.frame, self.schema_, table.place)
        index = self._frame(X).index
        out = pd.DataFrame(values, columns=list(self.schema_.features), index=index)
        if self.client is not None:
            out.insert(0, self.client, self._frame(X)[self.client].to_numpy())
        return out

    def get_feature_names_out(self, input_features: object = None) -> np.ndarray:
        check_is_fitted(self)
        return np.array([*([self.client] if self.client else []), *self.schema_.features], dtype=object)

    def _frame(self, x: object) -> pd.DataFrame:
        frame = to_pandas(x)
        if not isinstance(frame, pd.DataFrame):
            raise RequestError(f"TablePreprocessor takes a data frame, got {type(x).__name__}.")
        return frame

    def _features(self, x: object) -> pd.DataFrame:
        frame = self._frame(x)
        if self.client is not None and self.client not in frame.columns:
            raise RequestError(f"X has no client column {self.client!r}.")
        return frame.drop(columns=[] if self.client is None else [self.client]).reset_index(drop=True)
