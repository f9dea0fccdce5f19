"""docs/output-files.md: the files of a run directory, their columns and keys."""

from __future__ import annotations

import pyarrow as pa

from mooring.runs import directory as names
from mooring.runs.table_schemas import CLIENTS_SCHEMA, ROUNDS_SCHEMA

FILES = {  # file -> the commands that write it, and what it contains
    names.RUN_FILE: ("all", "the run file: data, task, algorithm and options, enough to run it again"),
    names.SCHEMA_FILE: ("all (tables)", "columns, types, scaling and categories: what predictions of new rows need"),
    names.SPLIT_FILE: ("all (tables)", "the part (train, validation or test) of each row"),
    names.INPUTS_FILE: ("all (arrays)", "the digest of data that came as arrays"),
    names.MODELS_FILE: ("all but compare", "the models; written last, so that a run with this file is finished"),
    names.CLIENTS_FILE: ("advise, fit, personalize", "one row per client; columns below"),
    names.ADVICE_FILE: ("advise", "recommendations, losses and everything that the report shows; keys below"),
    names.THEORY_FILE: ("advise", "what the theorems state for these clients, as `mooring theory --json` prints it"),
    names.SUMMARY_FILE: ("fit, personalize", "test losses and improvements; keys below"),
    names.ROUNDS_FILE: ("fit", "one row per round; columns below"),
    "models-last.safetensors": ("fit", "the models of the last round, where the best round is kept, or the reverse"),
    "checkpoint/": ("fit", "the latest states, for `mooring resume`"),
    names.SECONDS_FILE: ("fit, compare", "run times, apart because all other files are bit-for-bit reproducible"),
    names.COMPARISON_FILE: ("compare", "test scores of all methods; keys below"),
    "methods/": ("compare", "one run directory per method"),
    names.METHODS_CSV: ("compare", "one row per method"),
    names.SEEDS_CSV: ("compare", "one row per method and seed"),
    names.CURVES_CSV: ("compare", "one row per method, seed and evaluated round"),
    names.CLIENTS_CSV: ("compare", "one row per client, one column per method; of classes also 'METHOD accuracy'"),
    f"{names.CURVES_FIGURE}.png, .svg": ("compare", "test losses by round"),
    names.REPORT_FILE: ("advise, fit, compare", "the report"),
}
TENSORS = {
    "global": "[parameters]: the global model",
    "personal": "[clients, parameters]: each client's model, after `advise` the recommended one",
    "center": "[parameters]: what new clients are pulled to, where that is not the global model",
    "centers": "[settings, parameters]: the global model of each setting that personal models average",
    "slack.NAME": "[parameters]: variation between clients over noise, for new clients",
}
LINE = "mean, ci_low, ci_high (in the unit of the loss), pct, pct_ci_low, pct_ci_high (in percent of the other loss)"
ADVICE_KEYS = {
    "headline": "the recommendation in one sentence",
    "summary": "numbers of all clients together: see below",
    "clients": "one object per client with the columns of clients.parquet",
    "run": "the run directory (`--json` only)",
    "title": "name of the data",
    "notes": "notes on the data",
    "words": "sentences by topic: losses, confidence, rows_needed, contributions, outliers, shape, effects, theory",
    "plan": "family, value and held-out loss of the heaviest setting",
    "path": "held-out loss of candidates with the plan's columns: family, lam, loss",
    "client_paths": "each client's held-out losses along the path",
    "learning_curve": "a typical client's expected losses by rows; now, match",
    "intervals": "what prediction intervals are made from, or null",
    "column_effects": "columns whose effects are not linear: column, values, prediction, linear, curvature, spline",
    "candidates": "all settings that were compared",
}
SUMMARY_KEYS = {
    "local": "mean held-out loss of local models over rows",
    "global": "of the global model",
    "personal": "of personal models",
    "recommended": "of the recommended models",
    "metric": "name of the loss",
    "evaluated_on": "what the losses are measured on",
    "held_out_rows": "number of held-out rows",
    "held_out_measures": "well-known measures by model on held-out rows",
    "improvement_over_local": f"of the recommended models: {LINE}",
    "improvement_over_global": "the same over the global model",
    "personal_models": "improvement_over_local and improvement_over_global of personal models for all",
    "with_all_rows": "the same, expected of models fitted to all rows instead of those of the folds; null for networks",
    "recommended_counts": "clients by recommended model",
    "confidence_counts": "clients by confidence",
    "margin": "difference too small to matter, as a share of the loss",
    "level": "of the intervals above",
    "client_level": "of the clients' intervals",
    "test": "losses on a table's own test rows, which decide nothing; null without such rows",
    "measures": "rmse, r2, accuracy and the like on those test rows, by model",
    "heterogeneity": "R with its interval; null where no theorem applies",
    "threshold": "of R",
}
FIT_KEYS = {
    "metric": "name of the loss",
    "test_rows": "number of test rows",
    "level": "of the intervals",
    "local": "mean test loss of local models over rows",
    "pooled": "of the pooled model",
    "personal": "of the algorithm's models",
    "improvement_over_local": f"of the algorithm's models: {LINE}; null without local models",
    "improvement_over_pooled": "the same over the pooled model",
    "measures": "rmse, r2, accuracy and the like, by model",
    "checkpoint": "best or last: the round whose models are used",
    "best_round": "by validation loss",
    "last_round": "number of rounds",
    "privacy": "epsilon, delta, clip and noise of a private run",
    "intervals": "what prediction intervals are made from, if there are any",
    "title": "name of the data",
    "algorithm": "its name",
    "notes": "notes on the data",
}
COMPARISON_KEYS = {
    "metric": "name of the loss",
    "methods": "one object per method: test_loss, above_best_pct with its interval over clients, validation_loss, "
    "measures, rounds, used_round, last_test_loss, bytes, seconds; over several seeds also deviations and `behind`",
    "clients": "one object per client: client, rows, test (rows), its test loss (of classes also accuracy) by method",
    "run": "the run directory (`--json` only)",
    "title": "name of the data",
    "notes": "notes on the data",
}
HEAD = """# Output files

A run directory can be read without Mooring: TOML, JSON, Parquet, CSV and safetensors. Files hold only the columns and
keys that their run fills. Losses are in the target's own units (mean squared error, log-loss, ...); lower is better.

This page is written by `python -m tools.reference_pages output-files > docs/output-files.md`.
"""


def format_output_files() -> str:
    """Return the text of `docs/output-files.md`."""
    parts = [HEAD, "## Files", "", "| file | written by | contents |", "|---|---|---|"]
    parts += [f"| `{name}` | {writers} | {contents} |" for name, (writers, contents) in FILES.items()]
    for title, schema in ((names.CLIENTS_FILE, CLIENTS_SCHEMA), (names.ROUNDS_FILE, ROUNDS_SCHEMA)):
        parts += ["", f"## `{title}`", "", "| column | type | contents |", "|---|---|---|"]
        parts += [f"| `{field.name}` | {type_name(field)} | {field.metadata[b'about'].decode()} |" for field in schema]
    tables = {
        f"`{names.ADVICE_FILE}`; `mooring advise --json` prints the first four": ADVICE_KEYS,
        f"`summary` in `{names.ADVICE_FILE}`": SUMMARY_KEYS,
        f"`{names.SUMMARY_FILE}` of a fit; `summary` in `mooring fit --json`": FIT_KEYS,
        f"`{names.COMPARISON_FILE}`; `mooring compare --json` prints the first four": COMPARISON_KEYS,
    }
    for title, keys in tables.items():
        parts += ["", f"## {title}", "", "| key | contents |", "|---|---|"]
        parts += [f"| `{key}` | {contents} |" for key, contents in keys.items()]
    parts += ["", f"## Tensors in `{names.MODELS_FILE}`", "", "| tensor | contents |", "|---|---|"]
    parts += [f"| `{key}` | {contents} |" for key, contents in TENSORS.items()]
    return "\n".join(parts) + "\n"


def type_name(field: pa.Field) -> str:
    names_by_type = {pa.int64(): "integer", pa.float64(): "number", pa.string(): "text", pa.bool_(): "true or false"}
    return names_by_type[field.type]
