"""Data frames of an unpacked R package as parquet files; runs in an environment of its own that has rdata and pyarrow.

    python read_r_data.py PACKAGE_FOLDER OUTPUT_FOLDER NAME [NAME ...]

R packages keep data frames in .rda files, or in a lazy-loading database: Rdata.rdx maps names to positions within
Rdata.rdb, where each object is a length, for some compressions a letter, and a compressed serialization.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import warnings
import zlib
from pathlib import Path

import pandas as pd
import rdata

LENGTH_BYTES = 4


def decompress(block: bytes) -> bytes:
    """One object of Rdata.rdb: "2" marks bzip2, "Z" marks xz, anything else is zlib."""
    body = block[LENGTH_BYTES:]
    if body[:1] == b"2":
        return bz2.decompress(body[1:])
    if body[:1] == b"Z":
        return lzma.decompress(body[1:], format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}])
    return zlib.decompress(body)


def parse(serialization: bytes):
    return rdata.conversion.convert(rdata.parser.parse_data(serialization))


def read_lazy_database(folder: Path, names: set[str]) -> dict:
    index, objects = (folder / "Rdata.rdx").read_bytes(), (folder / "Rdata.rdb").read_bytes()
    places = parse(zlib.decompress(index) if index[:1] == b"\x78" else index)["variables"]
    frames = {}
    for name in names & set(places):
        start, length = (int(number) for number in places[name])
        frames[name] = parse(decompress(objects[start : start + length]))
    return frames


def read_package(folder: Path, names: set[str]) -> dict:
    frames = {}
    for file in sorted(folder.rglob("data/*")):
        if file.name == "Rdata.rdx":
            frames |= read_lazy_database(file.parent, names)
        elif file.suffix.lower() in (".rda", ".rdata") and file.stem in names:
            frames |= rdata.read_rda(file)
    return frames


def as_plain_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return factors as text; other columns are unchanged."""
    columns = {}
    for name, column in frame.items():
        is_factor = isinstance(column.dtype, pd.CategoricalDtype) or column.dtype == object
        columns[str(name)] = column.astype("string") if is_factor else column
    return pd.DataFrame(columns).reset_index(drop=True)


def main() -> None:
    source, target, names = Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdata warns of every R class that it turns into its base type
        frames = read_package(source, names)
    missing = names - set(frames)
    if missing:
        raise SystemExit(f"{source}: has no data frame {', '.join(sorted(missing))}.")
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        as_plain_columns(frames[name]).to_parquet(target / f"{name}.parquet")


if __name__ == "__main__":
    main()
