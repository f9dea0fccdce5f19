"""The bibliography: every paper that the package follows, under a short key that docstrings and messages cite it by.

A citation is a key and a place: "apfl, Theorem 2". Several are separated by semicolons. The five papers whose figures
and claims are reproduced also answer to a number, their alias, in ids such as 004-fig1.
"""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    key: str
    authors: tuple[str, ...]  # family names; none where the paper is anonymous
    title: str
    year: int | None  # None: under review
    where: str = ""
    about: str = ""
    alias: str = ""

    @property
    def citation(self) -> str:
        """Authors and year as a text cites them: up to three names."""
        names = self.authors or ("anonymous",)
        first, last = ", ".join(names[:-1]), names[-1]
        shown = f"{names[0]} et al." if len(names) > 3 else f"{first} and {last}" if first else last
        return f"{shown}, under review" if self.year is None else f"{shown} {self.year}"


PAPERS = (
    Paper(
        "alternative",
        ("Chen", "Zheng", "Long", "Su"),
        "A Theorem of the Alternative for Personalized Federated Learning",
        2021,
        about="statistical limits: one global model or local models; FedAvg, local training, two-stage FedProx",
        alias="000",
    ),
    Paper(
        "mspp",
        ("Yuan", "Li"),
        "On Convergence of FedProx: Local Dissimilarity Invariant Bounds, Non-smoothness and Beyond",
        2022,
        "NeurIPS",
        "optimisation of shared-model FedProx without dissimilarity assumptions; FedMSPP; non-smooth losses",
        "001",
    ),
    Paper(
        "apfl",
        ("Deng", "Kamani", "Mahdavi"),
        "Adaptive Personalized Federated Learning",
        2020,
        about="APFL: a mixture of a local and a global model per client",
        alias="002",
    ),
    Paper(
        "effect",
        (),
        "The Effect of Personalization in FedProx: A Fine-grained Analysis on Statistical Accuracy and Communication "
        "Efficiency",
        None,
        about="statistics and communication of FedProx as a bilevel problem; one-stage FedProx",
        alias="003",
    ),
    Paper(
        "kernel",
        ("Su", "Xu", "Yang"),
        "A Non-parametric View of FedAvg and FedProx: Beyond Stationary Points",
        2023,
        "Journal of Machine Learning Research",
        "FedAvg and FedProx in reproducing kernel Hilbert spaces; early stopping; federation gain",
        "004",
    ),
    Paper(
        "scaffold",
        ("Karimireddy", "Kale", "Mohri", "Reddi", "Stich", "Suresh"),
        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
        2020,
        "ICML",
        "FedAvg with control variates against the clients' drift",
    ),
    Paper(
        "per-fedavg",
        ("Fallah", "Mokhtari", "Ozdaglar"),
        "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
        2020,
        "NeurIPS",
        "a global model from which one gradient step makes a personal one",
    ),
    Paper(
        "pfedme",
        ("Dinh", "Tran", "Nguyen"),
        "Personalized Federated Learning with Moreau Envelopes",
        2020,
        "NeurIPS",
        "personal models as proximal points of the global one",
    ),
    Paper(
        "l2gd",
        ("Hanzely", "Richtarik"),
        "Federated Learning of a Mixture of Global and Local Models",
        2020,
        about="gradient steps and steps towards the clients' mean, by the throw of a coin",
    ),
    Paper(
        "ditto",
        ("Li", "Hu", "Beirami", "Smith"),
        "Ditto: Fair and Robust Federated Learning Through Personalization",
        2021,
        "ICML",
        "a personal model pulled towards FedAvg's",
    ),
    Paper(
        "fedper",
        ("Arivazhagan", "Aggarwal", "Singh", "Choudhary"),
        "Federated Learning with Personalization Layers",
        2019,
        about="a shared body and a head for each client",
    ),
    Paper(
        "lg-fedavg",
        ("Liang", "Liu", "Ziyin", "Allen", "Auerbach", "Brent", "Salakhutdinov", "Morency"),
        "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
        2020,
        about="a body for each client and a shared head",
    ),
    Paper(
        "fedbn",
        ("Li", "Jiang", "Zhang", "Kamp", "Dou"),
        "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
        2021,
        "ICLR",
        "normalization layers stay with the client",
    ),
    Paper(
        "fedrep",
        ("Collins", "Hassani", "Mokhtari", "Shakkottai"),
        "Exploiting Shared Representations for Personalized Federated Learning",
        2021,
        "ICML",
        "local heads and a shared body, trained in turn",
    ),
    Paper(
        "fedbabu",
        ("Oh", "Kim", "Yun"),
        "FedBABU: Towards Enhanced Representation for Federated Image Classification",
        2022,
        "ICLR",
        "a shared body under a fixed head, fine-tuned by each client",
    ),
    Paper(
        "fedala",
        ("Zhang", "Hua", "Wang", "Song", "Xue", "Ma", "Guan"),
        "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
        2023,
        "AAAI",
        "each client mixes its last model and the global one, weight by weight",
    ),
    Paper(
        "feddyn",
        ("Acar", "Zhao", "Matas Navarro", "Mattina", "Whatmough", "Saligrama"),
        "Federated Learning Based on Dynamic Regularization",
        2021,
        "ICLR",
        "local objectives whose minimizers agree with the global one",
    ),
    Paper(
        "ifca",
        ("Ghosh", "Chung", "Yin", "Ramchandran"),
        "An Efficient Framework for Clustered Federated Learning",
        2020,
        "NeurIPS",
        "several global models, each client trains the one that fits it best",
    ),
    Paper(
        "fedrod",
        ("Chen", "Chao"),
        "On Bridging Generic and Personalized Federated Learning for Image Classification",
        2022,
        "ICLR",
        "a generic head for balanced classes and a personal head on one body",
    ),
    Paper(
        "moon",
        ("Li", "He", "Song"),
        "Model-Contrastive Federated Learning",
        2021,
        "CVPR",
        "FedAvg with a contrastive loss on representations",
    ),
    Paper(
        "knnper",
        ("Marfoq", "Neglia", "Kameni", "Vidal"),
        "Personalized Federated Learning through Local Memorization",
        2022,
        "ICML",
        "FedAvg's model mixed with the nearest of a client's stored rows",
    ),
    Paper(
        "fedavg",
        ("McMahan", "Moore", "Ramage", "Hampson", "Aguera y Arcas"),
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        2017,
        "AISTATS",
        "FedAvg: local steps, then the average of the clients' models",
    ),
    Paper(
        "fedprox",
        ("Li", "Sahu", "Zaheer", "Sanjabi", "Talwalkar", "Smith"),
        "Federated Optimization in Heterogeneous Networks",
        2020,
        "MLSys",
        "FedProx: local steps with a pull towards the global model",
    ),
)

BY_KEY = {paper.key: paper for paper in PAPERS}
BY_ALIAS = {paper.alias: paper for paper in PAPERS if paper.alias}


def paper_key(text: str) -> str:
    """An id with its paper's key for the alias it may begin with: 004-fig1 is kernel-fig1, 004 is kernel."""
    number, dash, suffix = text.partition("-")
    return f"{BY_ALIAS[number].key}{dash}{suffix}" if number in BY_ALIAS else text


def expand_citations(text: str) -> str:
    """A citation with its authors: "apfl, Section 3" is "Deng, Kamani and Mahdavi 2020 (apfl), Section 3".

    A source that is not in the bibliography, such as that of a user's own algorithm, is returned unchanged.
    """
    parts = []
    for key, place in _parts(text):
        paper = f"{BY_KEY[key].citation} ({key})" if key in BY_KEY else key
        parts.append(f"{paper}, {place}" if place else paper)
    return "; ".join(parts)


def _parts(text: str) -> list[tuple[str, str]]:
    citations = [part.strip().partition(", ") for part in text.split(";")]
    return [(key, place) for key, _, place in citations]


def cited_papers(name: str, text: str) -> list[Paper]:
    """The papers of an algorithm: the one that is named as it, then those that its citation names."""
    keys = dict.fromkeys([name.replace("_", "-"), name.partition("_")[0], *(key for key, _ in _parts(text))])
    return [BY_KEY[key] for key in keys if key in BY_KEY]


def format_bibtex(paper: Paper) -> str:
    """A paper as an entry of BibTeX; a paper under review has no year."""
    fields = {
        "title": "{" + paper.title + "}",
        "author": " and ".join(paper.authors) or "Anonymous",
        ("journal" if "Journal" in paper.where else "booktitle"): paper.where,
        "year": "" if paper.year is None else str(paper.year),
        "note": "Under review" if paper.year is None else "",
    }
    kind = "misc" if not paper.where else "article" if "journal" in fields else "inproceedings"
    return _bibtex(kind, paper.key, fields)


def format_own_bibtex(version: str) -> str:
    """Mooring's own entry."""
    fields = {
        "title": "{Mooring: personalized federated learning}",
        "author": "{The Mooring authors}",
        "version": version,
        "note": "Python package mooring-fl",
    }
    return _bibtex("software", "mooring", fields)


def _bibtex(kind: str, key: str, fields: dict[str, str]) -> str:
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])
