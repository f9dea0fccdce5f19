"""The page docs/scikit-learn.md, as a reader would type it, in an empty folder."""

from tests.journeys.pages import blocks, run_python


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks("docs/scikit-learn.md", "python")
    assert len(found) >= 5
    names = run_python(found)
    assert names["own"] > names["pooled"] + 0.02
    assert names["search"].best_params_["lam"] == names["by_hand"]
