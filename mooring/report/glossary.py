"""The words of the commands and of the report, in two sentences each, and where to read more."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """A word, and its page in docs/."""

    text: str
    page: str
    also: tuple[str, ...] = ()  # other names of it


TERMS = {
    "client": Term(
        "A data holder, such as a hospital, a school or a phone. A table identifies it in its client column.",
        "tables.md",
        ("clients",),
    ),
    "local": Term(
        "The model fitted to one client's rows only, with a ridge chosen on validation rows. A client can train it "
        "without taking part in a federation.",
        "advice.md",
        ("local model", "local loss", "alone"),
    ),
    "global": Term(
        "One model for all clients, kept by the server. Unknown clients are predicted with it.",
        "advice.md",
        ("global model", "global loss", "common"),
    ),
    "pooled": Term(
        "One model fitted to all rows in one place, which only a simulation can do. `fit` reports it as a baseline.",
        "tables.md",
        ("pooled model", "baseline"),
    ),
    "personal": Term(
        "A model for one client between its local and the global model (partial pooling). Lambda sets how strongly it "
        "is pulled towards the global one.",
        "advice.md",
        ("personal model", "personal loss", "partial pooling"),
    ),
    "lambda": Term(
        "The strength of the pull towards the global model. At 0 a personal model is the local one; the larger lambda "
        "is, the closer it is to the global one.",
        "theory.md",
        ("lam", "pull"),
    ),
    "alpha": Term(
        "The weight of the local part in a mixture of local and global model, from 0 (global) to 1 (local). It is the "
        "alpha of APFL.",
        "maths.md",
        ("mixture",),
    ),
    "improvement": Term(
        "How much lower a loss is than that of another model, in the unit of the loss or in percent of the other loss. "
        "Below 0 the loss is higher.",
        "advice.md",
        (
            "improvement over local",
            "improvement over global",
            "vs. local",
            "vs. global",
            "gain",
        ),
    ),
    "interval": Term(
        "The range that contains the true improvement with the stated probability. If it includes 0, "
        "the data do not show which model is better.",
        "advice.md",
        ("ci", "confidence interval", "ci low", "ci high"),
    ),
    "confidence": Term(
        "How probable it is that the recommended model is better than both others: high from 0.95, moderate from 0.8, "
        "low below. A client's 90% interval excludes 0 exactly where the confidence is high.",
        "advice.md",
        ("high", "moderate", "low", "p(better than local)", "p(better than global)", "probability better"),
    ),
    "margin": Term(
        "A difference too small to matter, by default 1% of the loss (`--margin`). Within it the simpler model is "
        "recommended.",
        "advice.md",
    ),
    "recommended": Term(
        "The model that a client should use: local, global or personal. `mooring predict` uses it for its rows.",
        "advice.md",
        ("recommendation",),
    ),
    "lowest test loss": Term(
        "The model with the lowest loss on a client's test rows. It is a score and not a recommendation: few test rows "
        "cannot separate models.",
        "tables.md",
        ("lowest",),
    ),
    "plan": Term(
        "The kind of pull behind the recommended model: one lambda for all clients, by the client's rows, by "
        "coefficient, or a mixture. It is chosen on held-out rows.",
        "advice.md",
        ("size", "diagonal", "tuned"),
    ),
    "path": Term(
        "The held-out loss for every lambda between local models and the global model. Its lowest point is the best "
        "single lambda for all clients.",
        "advice.md",
    ),
    "distance": Term(
        "How far a client's model is from the global one, measured on standardized columns. In the picture it is the "
        "boat's distance from the buoy.",
        "reading-the-report.md",
        ("boat", "buoy"),
    ),
    "heterogeneity": Term(
        "How much the clients' true models differ (R), estimated from the variation of their fits less what chance "
        "explains. Above a theorem's threshold local models beat the global one.",
        "theory.md",
        ("r", "threshold", "between-client standard deviation"),
    ),
    "expected loss": Term(
        "The estimate of a client's loss on new rows: its measured loss, shrunk towards that of all clients, the more "
        "so the fewer rows it has. Percentages of a client are computed from expected losses.",
        "advice.md",
        ("expected", "shrunk"),
    ),
    "held-out rows": Term(
        "Rows that took no part in the fit that predicts them: with folds, every row is held out once. Measured losses "
        "are means over them.",
        "advice.md",
        ("held-out", "held out", "folds", "measured"),
    ),
    "rows to match": Term(
        "How many rows a local model would need to match the client's personal model. The difference from its rows "
        "today is what taking part is worth in data.",
        "advice.md",
    ),
    "contribution": Term(
        "How much the other clients' loss would rise without this client. Below 0 it would fall.",
        "advice.md",
    ),
    "outlier": Term(
        "A client whose coefficients are further from the others than chance and usual variation explain. "
        "Check its rows first: units or codes may differ.",
        "advice.md",
        ("is outlier",),
    ),
    "round": Term(
        "One exchange between server and clients: the global model goes out, clients update it, their changes return. "
        "The run keeps the models of the round with the best validation loss.",
        "tables.md",
        ("rounds", "kept round", "communication round"),
    ),
    "participation": Term(
        "The share of the clients in a round's cohort. Fewer clients make a round cheaper and noisier.",
        "options.md",
        ("cohort",),
    ),
    "rows": Term(
        "A client's rows are split into training, validation and test rows, 60, 20 and 20 in 100. `fit` chooses on "
        "validation rows and reports test rows; `advise` holds rows out in folds.",
        "tables.md",
        ("train", "validation", "test", "train rows", "validation rows", "test rows", "split"),
    ),
    "new client": Term(
        "A client that was not in a finished run. `mooring personalize` recommends a model for it.",
        "tables.md",
        ("personalize", "newcomer"),
    ),
    "ridge": Term(
        "A penalty on large coefficients that stabilizes a fit on few rows. Local models have one, chosen on held-out "
        "rows, so that they are a fair baseline.",
        "maths.md",
    ),
    "moreau envelope": Term(
        "The smooth function that results from minimizing a client's loss plus lambda/2 times the squared distance to "
        "the global model. FedProx descends along it, and the minimizer is the personal model.",
        "maths.md",
        ("moreau", "prox", "proximal"),
    ),
    "epsilon": Term(
        "The bound of differential privacy on what the global models reveal about one client: smaller is more private. "
        "It holds for the models of all rounds together.",
        "privacy.md",
        ("privacy", "delta"),
    ),
    "seed": Term(
        "The number that determines every random draw of a run. The same seed on the same data gives the same bytes.",
        "options.md",
    ),
}


def find_term(word: str) -> Term | None:
    """A term by any of its names, in any case."""
    asked = " ".join(word.replace("_", " ").casefold().split())
    return next((term for name, term in TERMS.items() if asked in (name, *term.also)), None)


def list_names() -> list[str]:
    """Every name that `find` knows."""
    return [word for name, term in TERMS.items() for word in (name, *term.also)]
