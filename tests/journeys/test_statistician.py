"""The page docs/coming-from-lme4.md, as a reader would type it, in an empty folder."""

from tests.journeys.pages import blocks, run_python


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python(blocks("docs/coming-from-lme4.md", "python"))
    model, simple = names["model"], names["simple"]
    assert model.log_likelihood > simple.log_likelihood
    assert len(model.random_effects) == 2 * 42 and "ICC" in model.summary()
