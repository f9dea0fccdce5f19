"""Where each module of the package is tested: every one has a place here or a test that names it.

A module `mooring/x/name.py` has a test file `tests/x/test_name.py`, or is imported by a test, or is in the table below.
"""

import ast

import pytest

from tests.support.repository import ROOT

TESTED_IN = {  # a module, or a package of modules that are tested alike: the test file
    "__main__": "journeys/test_operator.py",
    "advice.evaluation.held_out_predictions": "advice/test_advise.py",
    "advice.evaluation.row_access": "data/test_folds.py",
    "advice.federated.plan_text": "advice/test_federated_advice.py",
    "advice.federated.results": "advice/test_federated_server.py",
    "advice.reporting.explanations": "advice/test_advise.py",
    "advice.reporting.target_units": "advice/test_advise.py",
    "algorithms": "algorithms/test_contract.py",
    "commands": "test_cli.py",
    "core.process": "test_cli.py",
    "core.score_sentences": "advice/test_sentences.py",
    "core.threads": "engines/test_simulator.py",
    "core.types": "algorithms/test_contract.py",
    "data.client_arrays": "data/test_loading.py",
    "data.column_types": "data/test_loading.py",
    "data.cures": "app/test_web_server.py",
    "data.data_warnings": "data/test_messy_tables.py",
    "data.rare_categories": "remote/test_federation.py",
    "data.row_cleaning": "data/test_messy_tables.py",
    "data.sheet_layout": "data/test_messy_tables.py",
    "data.table_preprocessor": "test_estimators.py",
    "data.typed_columns": "data/test_loading.py",
    "engines.fit_files": "engines/test_fit.py",
    "engines.fit_tables": "engines/test_fit.py",
    "engines.progress": "engines/test_fit.py",
    "engines.training_checkpoint": "engines/test_resume.py",
    "mixed_models": "mixed_models/test_mixed_model.py",
    "partial_pooling.client_fits": "partial_pooling/test_lambda_path.py",
    "remote.transport": "remote/test_faults.py",
    "report.mixed_model_figures": "mixed_models/test_mixed_model.py",
    "runs.purposes": "runs/test_runfile.py",
    "tasks.fused": "core/test_sgd_step.py",
    "tasks.memory": "algorithms/test_knn_per.py",
    "tasks.network_checks": "tasks/test_network_surprises.py",
    "tasks.network_steps": "core/test_sgd_step.py",
}


def module_names() -> list[str]:
    files = [path.relative_to(ROOT / "mooring").with_suffix("") for path in (ROOT / "mooring").rglob("*.py")]
    return sorted(".".join(file.parts) for file in files if file.name != "__init__")


@pytest.fixture(scope="module")
def named() -> set[str]:
    """The modules that tests import, or that have a test file of their name in their package's folder."""
    folder, found = ROOT / "tests", set()
    files = [path.relative_to(folder) for path in folder.rglob("test_*.py")]
    for file in files:
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    names = {name.removeprefix("mooring.") for name in found if name.startswith("mooring.")}
    own = {(str(file.parent).split("/")[0], file.stem) for file in files}
    parts = {name: name.split(".") for name in module_names()}
    return names | {
        name
        for name, (*package, last) in parts.items()
        if (package[0] if package else ".", f"test_{last.lstrip('_')}") in own
    }


def is_in_table(name: str) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in TESTED_IN)


def test_every_module_is_tested_somewhere(named):
    """A new module gets a test file of its name, or a line in the table."""
    assert [name for name in module_names() if name not in named and not is_in_table(name)] == []


def test_the_table_names_what_exists():
    modules = module_names()
    for entry, file in TESTED_IN.items():
        assert (ROOT / "tests" / file).is_file(), file
        assert any(name == entry or name.startswith(f"{entry}.") for name in modules), entry
