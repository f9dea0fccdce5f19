"""Every row of the experiment catalogue has its claims; none is missing and none is unaccounted for."""

import pytest

from mooring.experiments.base import catalog

ROWS = {
    "alternative": {
        "E0-1 phase transition: FedAvg flat at 1/N, then slope 2 in R": ["alternative-phase fedavg-flat-then-slope-2"],
        "E0-1: training alone flat at 1/n": ["alternative-phase alone-flat"],
        "E0-1: curves cross within a factor 3 of 1/sqrt(n)": ["alternative-phase crossing"],
        "E0-1: dichotomous is the lower envelope": ["alternative-phase dichotomous-is-the-envelope"],
        "E0-2 known-R and full-data rules within a factor 3 of the envelope": [
            "alternative-alternative known-r-near-envelope",
            "alternative-alternative full-data-near-envelope",
        ],
        "E0-2: the sample split pays about twice the variance": ["alternative-alternative sample-split-pays-twice"],
        "E0-3 case A never above training alone": ["alternative-lambda a-never-above-alone"],
        "E0-3: case B below R/sqrt(n)": ["alternative-lambda b-below-r-over-sqrt-n"],
        "E0-3: case C of order 1/N": ["alternative-lambda c-of-order-1-over-n"],
        "E0-3: p_max lam <= mu/16": ["alternative-lambda pull-within-stability"],
        "E0-4 slopes -1 in t and k": [
            "alternative-rates common-slope-minus-1",
            "alternative-rates personal-slope-minus-1",
        ],
        "E0-4: bounds of Lemmas B.1 and B.2 never violated": ["alternative-rates bounds-never-violated"],
        "E0-4: overshoot with and without projection": ["alternative-rates early-overshoot"],
        "E0-5 weights by size better by the S2 ratio": [
            "alternative-weights size-weights-better",
            "alternative-weights factor-is-s2-ratio",
        ],
    },
    "kernel": {
        "Fig. 1a / 2a s = 1 reaches 0": [
            "kernel-fig1 s1-is-stationary",
            "kernel-fig2 s1-without-batches-is-stationary",
        ],
        "Fig. 1a / 2a s = 5, 10 and FedProx level off above 0": ["kernel-fig1 others-level-off"],
        "Fig. 1b / 3a almost the same error": ["kernel-fig1 same-error", "kernel-fig3 same-error-in-each-panel"],
        "Fig. 1b / 3a rounds shrink about s-fold": ["kernel-fig1 s-fold-fewer-rounds"],
        "Fig. 2b-d s = 5, 10 unaffected": ["kernel-fig2 s5-s10-unaffected"],
        "Fig. 2b-d s = 1 with minibatch no longer reaches 0": ["kernel-fig2 s1-no-longer-stationary"],
        "Fig. 2b-d FedProx minibatch near FedAvg s = 1 minibatch": ["kernel-fig2 fedprox-coincides-with-s1"],
        "Fig. 3b-d minibatch has almost no effect on the final error": ["kernel-fig3 batches-do-not-matter"],
        "Fig. 3b-d s = 1 slightly slower": ["kernel-fig3 s1-slightly-slower"],
        "Fig. 4 algorithms indistinguishable": ["kernel-fig4 methods-indistinguishable"],
        "Fig. 4 gain falls with the distance": ["kernel-fig4 gain-falls-with-distance"],
        "Fig. 4 scarce gains much more than rich": ["kernel-fig4 scarce-gains-much-more"],
        "Fig. 4 crossings": ["kernel-fig4 scarce-crosses-near-7", "kernel-fig4 rich-crosses-near-0.3"],
        "Fig. 5 algorithms identical": ["kernel-fig5 methods-identical"],
        "Fig. 5 curves equal up to r = 27": ["kernel-fig5 clients-alike-up-to-27"],
        "Fig. 5 jump from r = 16 to 23": ["kernel-fig5 jump-from-16-to-23"],
        "Fig. 5 scarce plateau near 107": ["kernel-fig5 scarce-plateau-near-107"],
        "Fig. 5 rich rises then falls near r = 100": ["kernel-fig5 rich-rises-then-falls"],
        "Fig. 6 four curves close": ["kernel-fig6 curves-close"],
        "Fig. 6 1/MSE linear in N": ["kernel-fig6 reciprocal-linear"],
        "Fig. 6 slope of s = 10 slightly smaller": ["kernel-fig6 s10-slope-slightly-smaller"],
        "E4-D error at T within a factor 3 of the best": ["kernel-stopping stop-near-best"],
        "E4-D longer runs overfit": ["kernel-stopping longer-runs-overfit"],
        "E4-D rate": ["kernel-stopping rate"],
    },
}


@pytest.mark.parametrize("paper", ROWS)
def test_every_row_has_its_claims(paper):
    there = {f"{entry.id} {claim.id}" for entry in catalog.select(paper) for claim in entry.experiment.claims}
    wanted = [claim for claims in ROWS[paper].values() for claim in claims]
    assert all(ROWS[paper].values())
    assert sorted(wanted) == sorted(there)
