"""Formats of numbers, amounts of money, percentages and dates in text cells, and their parsing.

    2.372,47 EUR    1 234,5    12 %    CHF 1'200.-    (1,200.50)    12,34,567    1:30    12 kg    31.12.2024

A `CellFormat` holds for a whole column. ISO dates (2024-12-31) and plain numbers (1234.5) are read under every format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

POINT, COMMA = ".", ","
ISO_DATE = "%Y-%m-%d"
DATE_FORMATS = (
    "%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d",
    "%Y.%m.%d", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%Y", "%d-%b-%y",
)  # fmt: skip
DATE_LIKE = re.compile(
    r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}|\d{1,2}[ -][A-Za-z]{3,9}[ -]\d{2,4}|[A-Za-z]{3,9} \d{1,2}, \d{4}"
)
ISO_LIKE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ]\d.*)?$")
TIME_OF_DAY = re.compile(r"[ T](\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)\s*$")
EPOCH, DAY = pd.Timestamp(0, tz="UTC"), pd.Timedelta(days=1)

PERCENT = "%"
CLOCK, CLOCK_UNIT = re.compile(r"^(\d{1,4}):([0-5]\d)(?::([0-5]\d))?$"), "H:MM"  # durations and times of day
CURRENCIES = {
    "€": "EUR",
    "£": "GBP",
    "¥": "JPY",
    "₹": "INR",
    "zł": "PLN",
    "kč": "CZK",
    "r$": "BRL",
    "fr.": "CHF",
    "sfr.": "CHF",
}
CURRENCY_CODES = (
    "AUD|BGN|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HKD|HUF|IDR|ILS|INR|ISK|JPY|KRW|MXN|MYR|NOK|NZD|PHP|PLN|RON|SEK|SGD|THB|"
    "TRY|TWD|UAH|USD|ZAR"
)
UNIT = rf"(?i:{CURRENCY_CODES}|s?fr\.|us\$|r\$|zł|kč|kr\.?|[€£¥₹$%])"
MEASURES = (  # units behind a number, as they are written
    "kg|mg|µg|g|t|lbs?|oz|km²|km2|m²|m2|cm²|m³|m3|km/h|m/s|mph|km|cm|mm|m|ft|in|miles?|ha|ml|cl|l|L|gal|hours?|hrs?|h|"
    "mins?|minutes?|s|sec|ms|days?|weeks?|months?|years?|yrs?|Tage?|Std|Stk|pcs|°C|°F|kWh|MWh|Wh|kW|MW|bar|hPa|mbar|"
    "mmHg|mmol/l|mmol/L|mg/dl|mg/dL|g/l|bpm|kcal|kJ|MB|GB|TB"
)
SIGN = r"[-+\u2212\u2013]"
GROUP = {POINT: "[,'\u2019 \u00a0\u2009\u202f]", COMMA: "[.'\u2019 \u00a0\u2009\u202f]"}
WHOLE_AMOUNT = {
    mark: re.compile(rf"[{marks}][-\u2013\u2014]{{1,2}}$") for mark, marks in ((POINT, "."), (COMMA, ",."))
}  # 200.-


def _body(decimal: str) -> str:
    """Return the pattern of a number without sign and unit; one mark separates all thousands."""
    point = re.escape(decimal)
    integer = rf"(?:[1-9]\d{{0,2}}(?:(?P<group>{GROUP[decimal]})\d{{3}})(?:(?P=group)\d{{3}})*|\d+)"
    if decimal == POINT:  # lakhs and crores: 12,34,567
        integer = rf"(?:{integer}|[1-9]\d?(?P<lakh>,)\d\d(?:,\d\d)*,\d{{3}})"
    return rf"(?:{integer}(?:{point}\d*)?|{point}\d+)(?:[eE][-+]?\d+)?"


NUMBERS = {
    decimal: re.compile(
        rf"^(?P<sign>{SIGN}?)\s*(?P<before>{UNIT})?\s*(?P<second>{SIGN}?)\s*(?P<number>{_body(decimal)})\s*"
        rf"(?P<after>{UNIT}|(?P<measure>{MEASURES}))?(?P<trailing>-?)$"
    )
    for decimal in (POINT, COMMA)
}


class CellFormat(NamedTuple):
    """Format of the text cells of a column."""

    decimal: str = POINT
    unit: str = ""  # a currency or "%": cells with another one are not of this column's format
    date: str = ISO_DATE

    def describe(self, kind: str) -> str | None:
        """Return the format in words; None for plain numbers, ISO dates and categories."""
        comma = f", decimal {'comma' if self.decimal == COMMA else 'point'}"
        if kind == "number" and self.unit == PERCENT:
            return f"percentages (12 % is 12){comma}"
        if kind == "number" and self.unit == CLOCK_UNIT:
            return "hours and minutes (1:30 is 90 minutes)"
        if kind == "number" and self.unit:
            return f"{'measurements' if is_measure(self.unit) else 'amounts'} in {self.unit}{comma}"
        if kind == "number" and self.decimal == COMMA:
            return "numbers, decimal comma"
        return f"dates, {date_in_words(self.date)}" if kind == "date" and self.date != ISO_DATE else None


def is_measure(unit: str) -> bool:
    """Return whether a unit is one of a measurement, such as kg."""
    return re.fullmatch(MEASURES, unit) is not None


def date_in_words(date_format: str) -> str:
    """Return a date format as people write it: %d.%m.%Y is DD.MM.YYYY."""
    abbreviations = {"%d": "DD", "%m": "MM", "%Y": "YYYY", "%y": "YY", "%b": "Mon", "%B": "Month"}
    return re.sub(r"%[dmYybB]", lambda match: abbreviations[match.group()], date_format)


def parse_number(text: str, decimal: str) -> tuple[float, str]:
    """Return the number in a text, or NaN, and its unit."""
    text = text.strip()
    if clock := CLOCK.match(text):
        hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return 60 * hours + minutes + seconds / 60, CLOCK_UNIT
    negative = text.startswith("(") and text.endswith(")")
    text = WHOLE_AMOUNT[decimal].sub("", text[1:-1].strip() if negative else text)
    match = NUMBERS[decimal].match(text)
    if match is None or (match["before"] and match["after"]):
        return np.nan, ""
    minus = [sign for sign in (match["sign"], match["second"], match["trailing"]) if sign and sign != "+"]
    if len(minus) + negative > 1:
        return np.nan, ""
    digits = match["number"]
    if match["group"] or match.groupdict().get("lakh"):
        digits = digits.replace(match["group"] or ",", "")
    value = float(digits.replace(decimal, "."))
    if match["measure"]:
        return (-value if minus or negative else value), match["measure"]
    unit = (match["before"] or match["after"] or "").lower()
    return (-value if minus or negative else value), CURRENCIES.get(unit, unit.upper().rstrip("."))


def parse_numbers(levels: Iterable[str], decimal: str = POINT) -> tuple[np.ndarray, np.ndarray]:
    """Return the number in each text, NaN if it is not a number, and its unit."""
    texts = pd.Series(list(levels), dtype=object)
    values = pd.to_numeric(texts, errors="coerce").to_numpy(float, copy=True)
    units = np.full(len(texts), "", dtype=object)
    # Under a decimal comma a point separates thousands: `to_numeric` would misread 1.234.
    is_plain = ~np.isnan(values) & (True if decimal == POINT else ~texts.str.contains(".", regex=False).to_numpy(bool))
    for i in np.flatnonzero(~is_plain):
        values[i], units[i] = parse_number(texts[i], decimal)
    return values, units


def parse_days(levels: Iterable[str], date_format: str = ISO_DATE) -> np.ndarray:
    """Return the day since 1970-01-01 of each text, NaN if it is not a date; ISO dates are read under any format."""
    texts = pd.Series(list(levels), dtype=object).str.strip()
    days = np.full(len(texts), np.nan)
    iso = texts.map(lambda text: ISO_LIKE.match(text) is not None).to_numpy(bool)
    if iso.any():
        days[iso] = days_of(pd.to_datetime(texts[iso], format="ISO8601", errors="coerce", utc=True))
    others = np.flatnonzero(~iso)
    if date_format == ISO_DATE or not len(others):
        return days
    time = texts[others].map(lambda text: match.group(1) if (match := TIME_OF_DAY.search(text)) else "0:00")
    date = texts[others].map(lambda text: TIME_OF_DAY.sub("", text))
    stamps = pd.to_datetime(date, format=date_format, errors="coerce", utc=True)
    clock = time.map(lambda text: text if text.count(":") == 2 else f"{text}:00")
    days[others] = days_of(stamps) + (pd.to_timedelta(clock, errors="coerce") / DAY).to_numpy(float)
    return days


def days_of(stamps: pd.Series) -> np.ndarray:
    """Days since 1970-01-01."""
    stamps = stamps.dt.tz_localize("UTC") if stamps.dt.tz is None else stamps
    try:
        return ((stamps - EPOCH) / DAY).to_numpy(float)
    except pd.errors.OutOfBoundsDatetime:  # years out of range for nanoseconds
        return ((stamps.dt.as_unit("s") - EPOCH.as_unit("s")) / DAY.as_unit("s")).to_numpy(float)


def possible_date_formats(levels: Iterable[str]) -> list[str]:
    """Return the formats, except ISO, under which some text is a date."""
    shaped = [text for text in levels if DATE_LIKE.match(text.strip()) and not ISO_LIKE.match(text.strip())]
    if not shaped:
        return []
    return [form for form in DATE_FORMATS if not np.isnan(parse_days(shaped, form)).all()]
