"""The words of the answers and of the page, in two sentences each, and where to read on."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """A word, and its page in docs/."""

    text: str
    page: str
    also: tuple[str, ...] = ()  # other names of it


TERMS = {
    "client": Term(
        "Whoever holds rows of their own: a hospital, a school, a phone. A table says by its client column whose "
        "each row is.",
        "tables.md",
        ("clients",),
    ),
    "alone": Term(
        "Every client's own fit on its own rows, with a ridge chosen on validation rows. It is what a client has "
        "who does not take part.",
        "advice.md",
        ("local", "training alone"),
    ),
    "common": Term(
        "One model for all clients, fitted to all rows. It is the buoy of the picture: what every personal model "
        "is moored to.",
        "advice.md",
        ("global", "buoy", "common model"),
    ),
    "personal": Term(
        "A model per client, moored to the common one by a line whose stiffness is lambda. It lies between "
        "training alone and one common model, and near whichever serves the client better.",
        "advice.md",
        ("boat", "personal model", "moored"),
    ),
    "lambda": Term(
        "The stiffness of the line between a client's model and the common one. At 0 everybody trains alone; the "
        "larger it is, the closer all stay to one common model.",
        "theory.md",
        ("lam", "stiffness", "pull"),
    ),
    "own share": Term(
        "The weight of a client's own model where it is mixed with the common one, from 0 (common) to 1 (own). "
        "APFL calls it alpha.",
        "maths.md",
        ("alpha", "mixture"),
    ),
    "gain": Term(
        "The test loss that a personal model saves over training alone, in the units of the loss or in per cent "
        "of it. Below 0 the client would do better alone.",
        "tables.md",
        ("saved", "gain %", "gain over alone", "gain over common"),
    ),
    "interval": Term(
        "The range that holds the true gain in 95 of 100 cases like this one. Where it lies on both sides of 0, "
        "these rows cannot tell whether the client gains.",
        "advice.md",
        ("low", "high", "confidence"),
    ),
    "how sure": Term(
        "How likely the recommended model is the better one for rows to come: sure from 95 in 100, likely from "
        "80, open below. More test rows make it surer; a pale boat is an open one.",
        "advice.md",
        ("sure", "likely", "open", "chance", "chance over alone", "chance over common", "certainty"),
    ),
    "practical difference": Term(
        "A difference too small to matter, by default one per cent of the loss. Inside this band the simpler "
        "model will do.",
        "advice.md",
        ("will do", "practical", "band"),
    ),
    "undecided": Term(
        "The test rows do not tell which of the models is better for this client. It is given the model of the "
        "plan all the same, which is the best guess.",
        "advice.md",
    ),
    "deploy": Term(
        "The kind of model that is recommended for a client: alone, common or personal. `mooring predict` answers"
        " its rows with that model.",
        "advice.md",
        ("verdict", "recommended", "recommendation"),
    ),
    "plan": Term(
        "How the clients are moored: one lambda for all, one by the client's rows, one by coefficient, or a "
        "mixture of models. It is chosen on rows that are not used to judge it.",
        "advice.md",
        ("size", "diagonal", "tuned"),
    ),
    "path": Term(
        "The held-out loss for every lambda from one common model to everyone alone. Its lowest point is where "
        "the clients as a whole are moored best.",
        "advice.md",
    ),
    "distance": Term(
        "How far a client's model is from the common one, measured on standardised columns. In the picture it is "
        "the boat's distance from the buoy.",
        "reading-the-report.md",
    ),
    "heterogeneity": Term(
        "How much the clients' true models differ, R, estimated from the spread of their fits less what chance "
        "explains. Beyond a theorem's threshold training alone beats one common model.",
        "theory.md",
        ("r", "spread", "threshold"),
    ),
    "rows to match": Term(
        "How many rows the client would need alone to do as well as with its personal model. It says what taking "
        "part is worth in data.",
        "advice.md",
    ),
    "brings": Term(
        "By how much the others' loss would rise without this client. Below 0 they would do better without it.",
        "advice.md",
        ("brings the others",),
    ),
    "unlike the rest": Term(
        "The client's model differs from the others' by more than chance and their usual spread explain. Look at "
        "its rows first: units or codes may differ there.",
        "advice.md",
        ("unlike",),
    ),
    "round": Term(
        "One exchange between server and clients: the common model goes out, the clients work, their changes come"
        " back. The models that are kept are those of the round with the best validation loss.",
        "tables.md",
        ("rounds", "kept round", "communication round"),
    ),
    "participation": Term(
        "The share of the clients that are asked in a round. Fewer make a round cheaper and noisier.",
        "options.md",
        ("cohort",),
    ),
    "rows": Term(
        "A client's rows are split into training, validation and test rows, 60, 20 and 20 in 100. Choices are "
        "made on validation rows, and what is reported is measured on test rows.",
        "tables.md",
        ("train", "validation", "test", "train rows", "validation rows", "test rows", "split"),
    ),
    "judged rows": Term(
        "The rows of a client by which its gain is judged: with folds, every row is held out once. The losses of "
        "single models are those of the test rows alone, so the two need not agree to the last digit.",
        "advice.md",
        ("folds", "held out"),
    ),
    "newcomer": Term(
        "A client that comes when the run is finished. `mooring personalize` gives it a model from the common one"
        " and says whether joining pays.",
        "tables.md",
        ("personalize",),
    ),
    "ridge": Term(
        "A penalty on large coefficients that keeps a fit on few rows from running wild. Training alone has one, "
        "chosen on validation rows, so that it is a fair opponent.",
        "maths.md",
    ),
    "moreau envelope": Term(
        "The smooth function that comes of minimising a client's loss plus lambda/2 times the squared distance "
        "from the common model. FedProx descends along it, and the minimiser is the personal model.",
        "maths.md",
        ("moreau", "prox", "proximal"),
    ),
    "seed": Term(
        "The number from which every draw of a run follows. The same seed on the same data gives the same bytes.",
        "options.md",
    ),
}


def find(word: str) -> Term | None:
    """A term by any of its names, whatever its capitals."""
    asked = " ".join(word.replace("_", " ").casefold().split())
    return next((term for name, term in TERMS.items() if asked in (name, *term.also)), None)


def words() -> list[str]:
    """Every name that `find` knows."""
    return [word for name, term in TERMS.items() for word in (name, *term.also)]
