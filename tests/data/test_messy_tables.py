"""Tables as people send them: four locales, three Excel shapes, and dirt. Right, or refused by row, column and cure."""

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.core.errors import RequestError
from mooring.data.data_checks import check
from mooring.data.loading import encode_new_rows, load

LOCALES = {
    "german": lambda v: f"{v:,.2f}".replace(",", "_").replace(".", ",").replace("_", ".") + " EUR",
    "swiss": lambda v: "CHF " + f"{v:,.2f}".replace(",", "'"),
    "french": lambda v: f"{v:,.2f}".replace(",", "\u202f").replace(".", ",") + " €",
    "american": lambda v: f"${v:,.2f}",
}
DATES = {"german": "%d.%m.%Y", "swiss": "%d.%m.%Y", "french": "%d/%m/%Y", "american": "%m/%d/%Y"}
HOW = {"client": "Filiale", "target": "Umsatz"}


def plain(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(rows) * 5, unit="D")
    size, share = rng.uniform(100, 9000, rows).round(2), rng.integers(1, 60, rows)
    sales = (2000 + 1.5 * size + 30 * share + rng.normal(0, 200, rows)).round(2)
    return pd.DataFrame(
        {
            "Filiale": np.resize(["Basel", "Bern", "Genf"], rows),
            "Fläche": size,
            "Anteil": share,
            "Tag": days,
            "Umsatz": sales,
        }
    )


def written(frame, locale):
    money = LOCALES[locale]
    text = frame.assign(**{name: frame[name].map(money) for name in ("Fläche", "Umsatz")})
    return text.assign(Anteil=frame["Anteil"].map(lambda v: f"{v} %"), Tag=frame["Tag"].dt.strftime(DATES[locale]))


@pytest.mark.parametrize("locale", LOCALES)
def test_a_table_of_any_locale_gives_the_numbers_of_the_plain_one(locale, tmp_path):
    frame = plain()
    path = tmp_path / "sales.csv"
    written(frame, locale).to_csv(path, sep=";" if locale != "american" else ",", index=False)
    found, expected = load(path, **HOW), load(frame, **HOW)
    assert found.features == expected.features and found.kind == "regression"
    np.testing.assert_allclose(found.train.x, expected.train.x, atol=1e-9)
    assert found.target_mean == pytest.approx(expected.target_mean)
    unit = {"german": "EUR, decimal comma", "french": "EUR, decimal comma", "swiss": "CHF", "american": "$"}[locale]
    assert any(f"amounts in {unit}" in note and "'Umsatz'" in note for note in found.notes)
    assert not [finding for finding in check(path, **HOW) if finding.severity == "error"]
    # Rows that come later are read in the same way, even where a few of them alone would be open to doubt.
    later = written(frame.head(4).assign(Fläche=1000.0), locale)
    later.to_csv(tmp_path / "later.csv", sep=";" if locale != "american" else ",", index=False)
    rows, targets, _ = encode_new_rows(tmp_path / "later.csv", found.schema)
    again, _, _ = encode_new_rows(frame.head(4).assign(Fläche=1000.0), expected.schema)
    np.testing.assert_allclose(rows, again, atol=1e-9)
    assert targets is not None


def test_models_predict_in_the_format_of_their_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = plain(90)
    written(frame, "german").to_csv("sales.csv", sep=";", index=False)
    mooring.fit("sales.csv", **HOW, algorithm="local", rounds=1, out="run", baselines=False)
    written(frame, "german").drop(columns="Umsatz").to_csv("new.csv", sep=";", index=False)
    predicted = mooring.open("run").predict("new.csv")
    assert np.corrcoef(predicted["Umsatz"], frame["Umsatz"])[0, 1] > 0.9
    assert predicted["Umsatz"].mean() == pytest.approx(frame["Umsatz"].mean(), rel=0.05)


@pytest.mark.parametrize("stray", ["-", "k.A.", "unbekannt"])
@pytest.mark.parametrize("column", ["Fläche", "Umsatz"])
def test_a_stray_text_among_numbers_is_refused_by_row_and_value(column, stray, tmp_path):
    frame = written(plain(30), "german")
    frame.loc[[6, 11], column] = stray
    frame.to_csv(tmp_path / "sales.csv", sep=";", index=False)
    with pytest.raises(RequestError, match=f"row 7, column '{column}': '{stray}' is not a number") as caught:
        load(tmp_path / "sales.csv", **HOW)
    assert f"--na '{stray}'" in str(caught.value)
    errors = [finding for finding in check(tmp_path / "sales.csv", **HOW) if finding.severity == "error"]
    assert [finding.column for finding in errors] == [column] and "row 7" in errors[0].sentence
    read = load(tmp_path / "sales.csv", **HOW, na=[stray], drop_missing_target=True)
    assert read.kind == "regression" and len(read.placement) == (28 if column == "Umsatz" else 30)


def test_few_numbers_among_texts_are_categories_and_a_column_may_be_said_to_be_one(tmp_path):
    frame = plain(40).assign(Klasse=np.resize(["1", "2", "A", "B"], 40))
    assert "Klasse=A" in load(frame, **HOW).features
    grades = plain(40).assign(Stufe=np.resize([*map(str, range(1, 10)), "K"], 40))
    with pytest.raises(RequestError, match=r"'K' is not a number.*--categorical 'Stufe'"):
        load(grades, **HOW)
    assert "Stufe=K" in load(grades, **HOW, categorical=["Stufe"]).features


def test_mixed_currencies_are_refused(tmp_path):
    frame = written(plain(30), "german")
    frame.loc[3, "Umsatz"] = "CHF 12,50"
    with pytest.raises(RequestError, match="row 4, column 'Umsatz': 'CHF 12,50' is a number in another format"):
        load(frame, **HOW)


def test_dates_that_could_be_two_are_refused_until_a_format_is_given():
    frame = plain(24)
    frame["Tag"] = [f"{1 + i % 12:02d}/{1 + i % 11:02d}/2024" for i in range(24)]
    with pytest.raises(RequestError, match=r"DD/MM/YYYY and as MM/DD/YYYY.*--date-format"):
        load(frame, **HOW)
    days = load(frame, **HOW, date_format="%m/%d/%Y")
    assert "Tag" in days.features


def test_the_decimal_mark_can_be_set():
    frame = plain(30)
    frame["Fläche"] = [f"{i + 1},{i:03d}" for i in range(30)]
    assert load(frame, **HOW).schema.mean[0] > 1000
    assert load(frame, **HOW, decimal=",").schema.mean[0] < 31


def write_sheets(path, sheets):
    with pd.ExcelWriter(path) as book:
        for name, cells in sheets.items():
            width = max(map(len, cells), default=0)
            padded = [[*row, *[None] * (width - len(row))] for row in cells]
            pd.DataFrame(padded, dtype=object).to_excel(book, sheet_name=name, header=False, index=False)


def as_cells(frame):
    return [list(frame.columns), *frame.astype(object).to_numpy().tolist()]


def test_excel_with_titles_totals_and_footers(tmp_path):
    pytest.importorskip("openpyxl")
    frame = plain(30)
    total = ["Summe", None, None, None, frame["Umsatz"].sum()]
    cells = [["Umsatzbericht 2024"], [], *as_cells(frame), total, [], ["Quelle: Controlling"]]
    write_sheets(tmp_path / "sales.xlsx", {"Daten": cells})
    clients = load(tmp_path / "sales.xlsx", **HOW)
    np.testing.assert_allclose(clients.train.x, load(frame, **HOW).train.x, atol=1e-9)
    assert any("row 3 was taken as the header" in note for note in clients.notes)
    assert any("1 total row was left out" in note for note in clients.notes)
    assert any("1 footer row was left out" in note for note in clients.notes)


def test_excel_with_several_sheets(tmp_path):
    pytest.importorskip("openpyxl")
    frame, other = plain(30), plain(20, seed=1)
    path = tmp_path / "sales.xlsx"
    write_sheets(path, {"Info": [["nur Text"]], "2023": as_cells(other), "2024": as_cells(frame)})
    first = load(path, **HOW)
    assert len(first.placement) == 20 and any("sheet '2023' of 3 was read" in note for note in first.notes)
    assert len(load(path, **HOW, sheet="2024").placement) == 30 == len(load(path, **HOW, sheet="3").placement)
    with pytest.raises(RequestError, match="no sheet 'x'; it has 'Info', '2023', '2024'"):
        load(path, **HOW, sheet="x")
    with pytest.raises(RequestError, match="sheet 'Info' has no table"):
        load(path, **HOW, sheet="Info")


def test_excel_that_is_empty_or_has_its_header_elsewhere(tmp_path):
    pytest.importorskip("openpyxl")
    path = tmp_path / "sales.xlsx"
    write_sheets(path, {"leer": []})
    with pytest.raises(RequestError, match="no table"):
        load(path, **HOW)
    frame = plain(30)
    write_sheets(path, {"a": [["A", "B", "C", "D", "E"], *as_cells(frame)]})
    assert len(load(path, **HOW, header_row=2).placement) == 30


def test_csv_with_a_title_line_and_a_total(tmp_path):
    frame = plain(30)
    body = frame.to_csv(sep=";", index=False)
    (tmp_path / "sales.csv").write_text("Bericht 2024\n\n" + body + f"Summe;;;;{frame['Umsatz'].sum()}\n")
    clients = load(tmp_path / "sales.csv", **HOW)
    assert len(clients.placement) == 30
    assert any("line 3 was taken as the header" in note for note in clients.notes)
    assert any("1 total row left out (row 31)" in note for note in clients.notes)


def test_a_leak_stops_advice_until_it_is_dropped_or_allowed():
    frame = plain(60).assign(Netto=lambda f: f["Umsatz"] / 1.19)
    with pytest.raises(RequestError, match="column 'Netto' predicts the target 'Umsatz' almost perfectly: use --drop"):
        mooring.advise(frame, **HOW)
    assert "Netto" not in mooring.advise(frame, **HOW, drop=["Netto"], theory=False).job.clients.features
    assert "Netto" in mooring.advise(frame, **HOW, allow=["Netto"], theory=False).job.clients.features
    found = [f for f in check(frame, **HOW) if f.column == "Netto"]
    assert [f.severity for f in found] == ["error"]
    assert [f.severity for f in check(frame, **HOW, allow=["Netto"]) if f.column == "Netto"] == ["note"]


def test_typing_errors_are_found_and_merged():
    frame = plain(60).assign(Wetter=np.resize(["sunny", "rainy", "windy"], 60))
    frame.loc[3, "Wetter"] = "suny"
    found = [f for f in check(frame, **HOW) if f.column == "Wetter"]
    assert any('--merge-levels "suny=sunny"' in f.sentence and f.severity == "warning" for f in found)
    clients = load(frame, **HOW, merge_levels=["suny=sunny"])
    assert "Wetter=suny" not in clients.features and "'suny' was read as 'sunny' in 1 cell." in clients.notes
    with pytest.raises(RequestError, match="'snow', which stands in no column"):
        load(frame, **HOW, merge_levels=["snow=rainy"])


def test_repeated_rows_are_dropped_on_request():
    frame = plain(40)
    twice = pd.concat([frame, frame.head(8)], ignore_index=True)
    assert len(load(twice, **HOW).placement) == 48
    clients = load(twice, **HOW, drop_repeats=True)
    assert len(clients.placement) == 40 and "8 rows left out that repeat an earlier row." in clients.notes


def test_extreme_numbers_are_pulled_in_on_request_in_training_and_prediction():
    frame = plain(100)
    frame.loc[5, "Fläche"] = 90_000.0
    clients = load(frame, **HOW, winsorize=0.02)
    low, high = clients.schema.clip["Fläche"]
    assert high < 9_001 and any("count as these" in note for note in clients.notes)
    rows, _, _ = encode_new_rows(frame.iloc[[5]], clients.schema)
    same, _, _ = encode_new_rows(frame.iloc[[5]].assign(Fläche=high), clients.schema)
    np.testing.assert_array_equal(rows, same)
    assert low > frame["Fläche"].min()


def test_clients_of_one_row_on_take_part_in_advice():
    rng = np.random.default_rng(0)
    code = np.repeat(np.arange(8), [1, 1, 2, 3, 4, 30, 40, 30])
    x = rng.normal(size=len(code))
    noise = rng.normal(size=len(code))
    frame = pd.DataFrame({"site": [f"s{i}" for i in code], "x": x, "y": rng.normal(0, 1, 8)[code] + x + noise})
    advice = mooring.advise(frame, client="site", target="y", theory=False)
    assert advice.clients["rows"].tolist() == [1, 1, 2, 3, 4, 30, 40, 30]
    assert set(advice.clients["recommended"]) <= {"local", "global", "personal"}
    assert not [f for f in check(frame, client="site", target="y", min_rows=1) if f.severity == "error"]
    with pytest.raises(RequestError, match="has 3 rows; at least 5 are needed"):
        mooring.fit(frame, client="site", target="y", rounds=1)


def test_lakhs_and_hours_are_numbers(tmp_path):
    amounts = [f'"{1 + i % 9},{10 + i % 80},{100 + i}"' for i in range(60)]
    hours = [f"{i % 4}:{i * 11 % 60 // 5 * 5:02d}" for i in range(60)]
    rows = [f"S{i % 3},{amounts[i]},{hours[i]},{i * 7 % 13}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["site,revenue,duration,x", *rows]) + "\n")
    clients = mooring.load(tmp_path / "rows.csv", client="site", target="revenue")
    expected = [100_000 * (1 + i % 9) + 1000 * (10 + i % 80) + 100 + i for i in range(60)]
    y = clients.target_mean + clients.target_scale * torch.cat([clients.train.y, clients.validation.y, clients.test.y])
    assert sorted(y.round().tolist()) == sorted(expected)
    assert clients.features == ("duration", "x")
    assert "Read as hours and minutes (1:30 is 90 minutes): 'duration'." in clients.notes
    x, _, _ = encode_new_rows(pd.DataFrame({"duration": ["1:30", "90:00"], "x": [1, 1]}), clients.schema)
    minutes = x[:, 0] * clients.schema.scale[0] + clients.schema.mean[0]
    assert minutes[0] == pytest.approx(90)


def test_unicode_text_of_excel_is_read(tmp_path):
    lines = ["Stra\u00dfe\tx\ty", *(f"S{i % 3}\t{i * 5 % 11}\t{i * 7 % 13}" for i in range(60))]
    (tmp_path / "rows.csv").write_bytes("\n".join(lines).encode("utf-16"))
    assert mooring.load(tmp_path / "rows.csv", client="Stra\u00dfe", target="y").names == ("S0", "S1", "S2")
    (tmp_path / "cut.csv").write_bytes("\n".join(lines).encode("utf-16")[:-1])
    with pytest.raises(RequestError, match="is not readable as utf-16; it may be cut off"):
        mooring.load(tmp_path / "cut.csv", client="Stra\u00dfe", target="y")


def test_client_names_without_their_spaces_and_with_a_note_on_case():
    names = [("North ", "North", "north", "South", "South", "South")[i % 6] for i in range(90)]
    frame = pd.DataFrame({"site": names, "x": [i * 5 % 11 for i in range(90)], "y": [i * 7 % 13 for i in range(90)]})
    clients = mooring.load(frame, client="site", target="y")
    assert clients.names == ("North", "South", "north")
    note = "Clients 'North' and 'north' differ in case or spaces only, but count as two; --merge-levels \"north=North\""
    assert any(text.startswith(note) for text in clients.notes)
    merged = mooring.load(frame, client="site", target="y", merge_levels=["north=North"])
    assert merged.names == ("North", "South")


def shops(rows=60, seed=0):
    """A plain table: shops, numbers, and a target that follows from them."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"shop": rng.choice(["Nord", "Ost", "West"], rows), "sales": rng.gamma(5, 400, rows).round(2)})
    frame["weight"] = rng.integers(1, 80, rows)
    return frame.assign(profit=(0.3 * frame["sales"] + 2 * frame["weight"] + rng.normal(0, 60, rows)).round(2))


def read(path, **options):
    """The table as `advise` reads it; `check` must agree on whether it can be read."""
    options = {"client": "shop", "target": "profit", "min_rows": 1, "drop_missing_target": True} | options
    errors = [finding.sentence for finding in check(path, **options) if finding.severity == "error"]
    try:
        clients = load(path, refuse_leaks=True, **options)
    except RequestError as refusal:
        assert str(refusal) in errors
        raise
    assert not errors
    return clients


def write(path, frame):
    frame.to_csv(path, index=False, sep=";")
    return path


def test_units_in_cells_are_read_and_reported(tmp_path):
    frame = shops().assign(weight=lambda f: [f"{value} kg" for value in f["weight"]])
    frame["area"] = [f"{value / 30:.1f} m²" for value in frame["sales"]]
    clients = read(write(tmp_path / "units.csv", frame))
    assert list(clients.features) == ["sales", "weight", "area"]
    assert any("measurements in kg" in note for note in clients.notes)
    plain = read(write(tmp_path / "plain.csv", shops().assign(area=(frame["sales"] / 30).round(1))))
    torch.testing.assert_close(clients.train.x, plain.train.x)


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("weight", lambda value, k: f"{value} kg" if k % 3 else f"{1000 * value} g"),
        ("weight", lambda value, k: f"{value} kg" if k % 3 else str(value)),
        ("sales", lambda value, k: f"{value:.2f} EUR" if k % 3 else f"{value:.2f} USD"),
        ("sales", lambda value, k: f"{value:.2f}" if k % 3 else f"{value:.2f}".replace(".", ",")),
        ("sales", lambda value, k: f"{value / 100:.3f}" if k != 40 else f"{value / 100:.3f}".replace(".", ",")),
        ("sales", lambda value, k: f"{value / 100:.1f}%" if k % 3 else f"{value / 1e4:.3f}"),
    ],
)
def test_numbers_in_two_formats_are_refused_by_row_and_cure(column, cells, tmp_path):
    frame = shops()
    frame[column] = [cells(value, k) for k, value in enumerate(frame[column])]
    path = write(tmp_path / "two.csv", frame)
    with pytest.raises(RequestError, match=rf"two\.csv, row \d+, column '{column}': .* another format than .*--drop"):
        read(path)
    assert column not in read(path, drop=[column]).features


def test_codes_with_leading_zeros_are_categories_in_training_and_prediction(tmp_path):
    frame = shops().assign(zip=lambda f: np.where(f["weight"] % 2 == 0, "01099", "80331"))
    clients = read(write(tmp_path / "codes.csv", frame))
    assert "zip=80331" in clients.features and any("leading zeros: 'zip'" in note for note in clients.notes)
    again = load(tmp_path / "codes.csv", schema=clients.schema, min_rows=1)
    torch.testing.assert_close(again.train.x, clients.train.x)


def test_a_header_that_stands_twice_is_left_out(tmp_path):
    lines = shops().to_csv(index=False).splitlines()
    (tmp_path / "twice.csv").write_text("\n".join([*lines[:30], lines[0], *lines[30:]]))
    clients = read(tmp_path / "twice.csv")
    assert len(clients.placement) == 60 and any("header stands again in row 30" in note for note in clients.notes)


def test_lines_with_too_many_or_too_few_cells_are_named(tmp_path):
    lines = shops().to_csv(index=False).splitlines()
    (tmp_path / "long.csv").write_text("\n".join([*lines[:10], lines[10] + ",99", *lines[11:], ""]))
    with pytest.raises(RequestError, match="line 11 has 5 cells, but the header has 4; delete the surplus one"):
        read(tmp_path / "long.csv")
    (tmp_path / "short.csv").write_text("\n".join([*lines[:10], lines[10].rsplit(",", 2)[0], *lines[11:], ""]))
    assert any("line 11 has 2 of 4 cells" in note for note in read(tmp_path / "short.csv").notes)


def test_answers_in_several_languages_are_two_levels_after_the_suggested_merge(tmp_path):
    words = ["ja", "nein", "yes", "no", "vrai", "faux", "TRUE", "FALSE"]
    path = write(tmp_path / "answers.csv", shops(120).assign(active=np.resize(words, 120)))
    options = {"client": "shop", "target": "profit", "min_rows": 1}
    (finding,) = [finding for finding in check(path, **options) if "words for yes and no" in finding.sentence]
    clients = read(path, merge_levels=[cure.value for cure in finding.cures])
    assert "active=yes" in clients.features and len(clients.features) == 3
    assert clients.schema.merges["ja"] == "yes"  # predictions merge as well


def test_a_rare_spelling_becomes_the_frequent_one(tmp_path):
    frame = shops().assign(color=np.resize(["red", "blue"], 60), won=lambda f: np.where(f["profit"] > 600, "Yes", "no"))
    frame.loc[3, "color"], frame.loc[int(np.flatnonzero(frame["won"] == "Yes")[0]), "won"] = "RED", "YES"
    path = write(tmp_path / "spelling.csv", frame)
    cures = [c.value for finding in check(path, client="shop", target="won", min_rows=1) for c in finding.cures]
    assert "RED=red" in cures and "YES=Yes" in cures


def test_an_outlier_is_shown_as_it_stands(tmp_path):
    """The survey rounds extremes, since a server sees them; the person with the table sees the cell."""
    frame = shops(300)
    frame["stock"] = np.random.default_rng(1).normal(500, 30, 300).round()
    frame.loc[5, "stock"] = -19_999
    path = write(tmp_path / "far.csv", frame)
    notes = [*read(path).notes, *(f.sentence for f in check(path, client="shop", target="profit", min_rows=1))]
    assert sum("column 'stock': -19999 lies" in note for note in notes) == 2


def test_a_missing_client_name_is_refused_with_its_cure(tmp_path):
    frame = shops()
    frame.loc[59, "shop"] = None
    with pytest.raises(RequestError, match=r"row 60, client column .shop.: the name is missing\. Fill it in"):
        read(write(tmp_path / "nameless.csv", frame))


@pytest.mark.parametrize("ending", ["csv", "xlsx", "frame"])
def test_a_code_for_missing_is_read_as_missing_on_request(ending, tmp_path):
    frame = shops().assign(stock=np.random.default_rng(1).normal(20, 2, 60).round(1))
    frame.loc[[3, 30, 50], "stock"] = -999
    source = frame if ending == "frame" else tmp_path / f"codes.{ending}"
    if ending == "xlsx":
        frame.to_excel(source, index=False)
    elif ending == "csv":
        frame.to_csv(source, index=False)
    options = {"client": "shop", "target": "profit", "min_rows": 1}
    (cure,) = [cure for finding in check(source, **options) for cure in finding.cures if cure.option == "na"]
    assert cure.value == "-999" and "stock missing" in load(source, **options, na=[cure.value]).features


@pytest.mark.parametrize(
    "cell",
    [
        lambda value, k: f"~{value:.1f}" if k % 9 == 0 else f"{value:.1f}",
        lambda value, k: f"{value / 1000:.2f}k",
        lambda value, k: f"{value:.2f}*" if k % 9 == 0 else f"{value:.2f}",
    ],
)
def test_numbers_in_an_unknown_format_are_refused(cell, tmp_path):
    frame = shops().assign(sales=lambda f: [cell(value, k) for k, value in enumerate(f["sales"])])
    with pytest.raises(
        RequestError, match=r"row 1, column 'sales': .* looks like a number, but its format is not known"
    ):
        read(write(tmp_path / "unknown.csv", frame))
    assert "sales" not in read(tmp_path / "unknown.csv", drop=["sales"]).features


def test_dates_in_two_formats_are_refused(tmp_path):
    days = pd.date_range("2024-01-01", periods=60, freq="5D")
    frame = shops().assign(day=[d.strftime("%d.%m.%Y" if k % 3 else "%m/%d/%Y") for k, d in enumerate(days)])
    with pytest.raises(
        RequestError, match=r"row 1, column 'day': '01/01/2024' is a date in another format than '06\.01"
    ):
        read(write(tmp_path / "dates.csv", frame))


@pytest.mark.parametrize("labels", [["room 1", "room 2", "room 12"], ["18-25", "26-35", "51+"], ["A1", "B2", "C3.1"]])
def test_labels_with_numbers_stay_categories(labels, tmp_path):
    clients = read(write(tmp_path / "labels.csv", shops().assign(label=np.resize(labels, 60))))
    assert f"label={labels[0]}" in clients.features


def test_brazilian_amounts_and_totals_that_are_named_like_clients(tmp_path):
    amounts = [f"R$ {v:,.2f}".replace(",", "_").replace(".", ",").replace("_", ".") for v in shops()["sales"]]
    frame = shops().assign(sales=amounts)
    frame.loc[30, "shop"] = "Subtotal"
    clients = read(write(tmp_path / "reais.csv", frame))
    assert any("amounts in BRL" in note for note in clients.notes)
    assert "Client 'Subtotal' is named like a total; if its rows are sums of others, delete them." in clients.notes
