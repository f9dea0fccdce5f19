"""How cells are written: numbers, money, percentages, dates."""

import numpy as np
import pytest

from mooring.data.cell_formats import COMMA, POINT, CellFormat, parse_days, parse_number, possible_date_formats


@pytest.mark.parametrize(
    ("text", "decimal", "value", "unit"),
    [
        ("2.372,47 EUR", COMMA, 2372.47, "EUR"),
        ("1 234,5", COMMA, 1234.5, ""),
        ("1\u202f234,50 €", COMMA, 1234.5, "EUR"),
        ("12 %", COMMA, 12, "%"),
        ("12.5%", POINT, 12.5, "%"),
        ("CHF 1'200.-", COMMA, 1200, "CHF"),
        ("CHF 1\u2019200.50", POINT, 1200.5, "CHF"),
        ("1.200,-", COMMA, 1200, ""),
        ("$1,234.50", POINT, 1234.5, "$"),
        ("(1,200.50)", POINT, -1200.5, ""),
        ("€ -3,5", COMMA, -3.5, "EUR"),
        ("-€3,5", COMMA, -3.5, "EUR"),
        ("12,50-", COMMA, -12.5, ""),
        ("1,5e3", COMMA, 1500, ""),
        ("1,234", POINT, 1234, ""),
        ("1,234", COMMA, 1.234, ""),
        ("1.234", COMMA, 1234, ""),
    ],
)
def test_numbers(text, decimal, value, unit):
    assert parse_number(text, decimal) == (pytest.approx(value), unit)


@pytest.mark.parametrize("text", ["2.372,47", "0,75", "-", "k.A.", "12,5", "--5", "5 5", "EUR 5 EUR", ""])
def test_what_is_no_number_with_a_decimal_point(text):
    assert np.isnan(parse_number(text, POINT)[0])


@pytest.mark.parametrize("text", ["12.5", "1,200.50", "1.23", "12 apples"])
def test_what_is_no_number_with_a_decimal_comma(text):
    assert np.isnan(parse_number(text, COMMA)[0])


def test_dates():
    day = (np.datetime64("2024-12-31") - np.datetime64("1970-01-01")).astype(int)
    assert parse_days(["31.12.2024", "2024-12-31", "31.12.2024 12:00", "x", "32.1.2024"], "%d.%m.%Y") == pytest.approx(
        [day, day, day + 0.5, np.nan, np.nan], nan_ok=True
    )
    assert parse_days(["12/31/2024"], "%m/%d/%Y").tolist() == [day]
    assert possible_date_formats(["03/04/2024", "13/04/2024"]) == ["%d/%m/%Y", "%m/%d/%Y"]
    assert possible_date_formats(["3.5", "12", "abc", "2024-01-05"]) == []


def test_formats_in_words():
    assert CellFormat(COMMA, "EUR").describe("number") == "amounts in EUR, decimal comma"
    assert CellFormat(POINT, "%").describe("number") == "percentages (12 % is 12), decimal point"
    assert CellFormat(date="%d.%m.%Y").describe("date") == "dates, DD.MM.YYYY"
    assert CellFormat().describe("number") is None
