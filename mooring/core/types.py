"""Names for types that many modules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]  # what JSON or TOML can hold, or keyword arguments: values by name
NamedValues = Mapping[str, Any]  # the same, only read
