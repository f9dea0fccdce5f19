from mooring.core.natural_order import natural_key


def test_numbers_count_as_numbers_and_text_as_text():
    assert sorted(["fig10", "b", "fig2", "29", "7", "a"], key=natural_key) == ["7", "29", "a", "b", "fig2", "fig10"]
