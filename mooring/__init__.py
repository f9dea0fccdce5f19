"""Mooring: personalized federated learning. How tightly should each client be moored to the others?"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooring.advice.advise import advise as advise
    from mooring.advice.new_clients.personalize import personalize as personalize
    from mooring.core.errors import RequestError as RequestError
    from mooring.core.errors import WorkError as WorkError
    from mooring.data.loading import load as load
    from mooring.data.table_preprocessor import TablePreprocessor as TablePreprocessor
    from mooring.engines.compare import compare as compare
    from mooring.engines.exported_models import load_sklearn as load_sklearn
    from mooring.engines.fit import fit as fit
    from mooring.engines.predict import predict as predict
    from mooring.engines.saved_run import open as open
    from mooring.estimators import PersonalizedClassifier as PersonalizedClassifier
    from mooring.estimators import PersonalizedRegressor as PersonalizedRegressor
    from mooring.mixed_models.comparison import compare_models as compare_models
    from mooring.mixed_models.mixed_model import fit_mixed_model as fit_mixed_model
    from mooring.report.figures import plot as plot
    from mooring.report.html_report import write_report as write_report
    from mooring.run_verbs import resume as resume

    __version__: str

# PyTorch asks for large pages for large tensors: a cohort's matrix is new every round, and small pages cost as much
# time as what is written to them. Read by PyTorch when it first makes a tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# What `import mooring` offers; each name is imported when it is first used, so that the package stays quick to load.
_PUBLIC = {
    "fit": "mooring.engines.fit",
    "resume": "mooring.run_verbs",
    "advise": "mooring.advice.advise",
    "compare": "mooring.engines.compare",
    "compare_models": "mooring.mixed_models.comparison",
    "fit_mixed_model": "mooring.mixed_models.mixed_model",
    "personalize": "mooring.advice.new_clients.personalize",
    "plot": "mooring.report.figures",
    "write_report": "mooring.report.html_report",
    "load": "mooring.data.loading",
    "load_sklearn": "mooring.engines.exported_models",
    "open": "mooring.engines.saved_run",
    "predict": "mooring.engines.predict",
    "RequestError": "mooring.core.errors",
    "WorkError": "mooring.core.errors",
    "PersonalizedRegressor": "mooring.estimators",
    "TablePreprocessor": "mooring.data.table_preprocessor",
    "PersonalizedClassifier": "mooring.estimators",
}

__all__ = [
    "PersonalizedClassifier",
    "PersonalizedRegressor",
    "RequestError",
    "TablePreprocessor",
    "WorkError",
    "advise",
    "compare",
    "compare_models",
    "fit",
    "fit_mixed_model",
    "load",
    "load_sklearn",
    "open",
    "personalize",
    "plot",
    "predict",
    "resume",
    "write_report",
]

if not TYPE_CHECKING:  # so that a type checker accepts the names above only

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("mooring.runs.sections").installed_version()
        if name not in _PUBLIC:
            raise AttributeError(f"mooring has no attribute {name!r}; it offers {', '.join(__all__)}.")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
