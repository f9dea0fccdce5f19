"""Generators: one contract for all, then what each source prescribes, checked on its draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import eval_chebyu, expit
from scipy.stats import norm

from mooring.core.errors import RequestError
from mooring_papers.generators import (
    BagOfWords,
    Chebyshev,
    HardLogistic,
    LinearFederation,
    LinearKernel,
    Prototypes,
    SyntheticClasses,
    SyntheticLogit,
    covariate_heterogeneity,
    model_heterogeneity,
    stationarity_setup,
)
from mooring_papers.generators.chebyshev import U5, squared_distance
from mooring_papers.generators.random_streams import ROWS_STREAM, client_generator, client_generators

SMALL = {
    "classes": SyntheticClasses(clients=4, samples=30, dim=5, classes=3, model_spread=1.0, input_spread=1.0, test=0),
    "lognormal": SyntheticClasses(clients=4, samples="lognormal", dim=5, classes=3, most=80, test=0),
    "logit": SyntheticLogit(clients=4, samples=30, dim=3),
    "hard": HardLogistic(clients=4, samples=30, dim=3),
    "smooth": HardLogistic(clients=4, samples=(30, 40, 50, 60), dim=3, family="smooth", inputs="rademacher", ridge=0.1),
    "federation": LinearFederation(clients=4, samples=30, dim=3),
    "powerlaw": LinearFederation(clients=4, samples=30, dim=3, sizes="powerlaw", intercept=True),
    "kernel": LinearKernel(clients=4, samples=30, dim=6, gap=1.0, mode="gaussian"),
    "sparse": LinearKernel(clients=4, samples=30, dim=6, design="sparse", rank=2),
    "orthogonal": LinearKernel(clients=4, samples=5, dim=6, design="orthogonal", rank=5),
    "chebyshev": Chebyshev(clients=4, samples=5),
    "prototypes": Prototypes(clients=4, samples=30, dim=5, classes=3, style=0.5, classes_per_client=2, test=0),
    "words": BagOfWords(clients=4, samples=30, words=12, test=0),
}
# Their common truths or sizes depend on who takes part, by definition.
COUPLED = {"smooth", "powerlaw", "kernel", "chebyshev"}


def arrays(clients, part):
    return [tuple(t.numpy() for t in getattr(clients, part).of(i)) for i in range(len(clients))]


def same(a, b):
    return all(np.array_equal(x, u) and np.array_equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_contract(name):
    small = SMALL[name]
    clients = small.make(3)
    truth = clients.truth
    assert len(clients) == 4 and truth.w.shape[0] == 4 and truth.w.dtype == torch.float64
    assert torch.allclose(truth.p, clients.weights())
    assert np.isfinite([truth.r_rms, truth.r_max, truth.diameter]).all()
    assert truth.r_rms <= truth.r_max + 1e-12 and truth.diameter <= 2 * truth.r_max + 1e-12
    assert torch.isfinite(clients.train.x).all() and len(clients.validation.y) == len(clients.test.y) == 0
    assert same(arrays(clients, "train"), arrays(small.make(3), "train"))
    assert not same(arrays(clients, "train"), arrays(small.make(4), "train"))


@pytest.mark.parametrize("name", SMALL)
def test_held_out_rows_leave_the_training_rows_alone(name):
    plain, more = SMALL[name].make(3), replace(SMALL[name], validation=4, test=7).make(3)
    assert same(arrays(plain, "train"), arrays(more, "train"))
    assert more.validation.size.tolist() == [4] * 4 and more.test.size.tolist() == [7] * 4
    assert torch.equal(plain.truth.w, more.truth.w)
    assert not np.array_equal(arrays(more, "test")[0][0][:4], arrays(more, "validation")[0][0])


@pytest.mark.parametrize("name", sorted(set(SMALL) - COUPLED))
def test_a_clients_rows_do_not_depend_on_the_others(name):
    few, many = SMALL[name].make(3), replace(SMALL[name], clients=6).make(3)
    assert same(arrays(few, "train"), arrays(many, "train")[:4])


def test_shares_are_taken_from_the_samples():
    clients = SyntheticClasses(clients=2, samples=(50, 11), dim=3, classes=2, validation=0.1, test=0.2).make()
    assert [part.size.tolist() for part in (clients.train, clients.validation, clients.test)] == [
        [35, 8],
        [5, 1],
        [10, 2],
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (SyntheticLogit(clients=0), "clients must be at least 1"),
        (SyntheticLogit(clients=3, samples=(5, 5)), "samples lists 2 numbers for 3 clients"),
        (SyntheticLogit(samples=2, test=0.9), "client 0 has 2 samples, 2 of them held out"),
        (SyntheticLogit(test=-1), "test must be a share below 1 or a whole number"),
        (SyntheticLogit(test=1.5), "test must be a share below 1 or a whole number"),
        (SyntheticLogit(spread=-1), "SyntheticLogit: spread must be a number >= 0, got -1"),
        (SyntheticClasses(spreads="sd"), "spreads must be one of std, var, got 'sd'"),
        (SyntheticClasses(samples="pareto"), "samples must be one of lognormal"),
        (HardLogistic(family="soft"), "family must be one of hard, smooth"),
        (HardLogistic(scale=1.0), "scale must be in"),
        (LinearFederation(spread=(1.0, 2.0), dim=3), "spread lists 2 numbers for 3 coefficients"),
        (LinearFederation(samples=(1,) * 50, sizes="powerlaw"), "one number, the mean"),
        (LinearKernel(mode="other"), "mode must be one of probe_vs_rest, gaussian, probe_moved, two_cluster"),
        (LinearKernel(probe=25), "probe must be 0 to 24"),
        (LinearKernel(design="sparse", rank=101), "rank must be 1 to 100, got 101"),
        (LinearKernel(design="sparse", rank=(1, 2)), "rank lists 2 numbers for 25 clients"),
        (LinearKernel(design="orthogonal", rank=50), "client 0 has 500 rows and rank 50"),
        (Chebyshev(test=0.2), "test must be a whole number of extra rows"),
        (Prototypes(classes_per_client=11), "classes_per_client must be 1 to 10, got 11"),
        (Prototypes(noise=0.0), "noise must be > 0"),
        (BagOfWords(classes=1), "classes must be at least 2"),
    ],
)
def test_wrong_parameters_are_named(make, says):
    with pytest.raises(RequestError, match=says):
        make.make()


def test_synthetic_classes_follow_the_recipe():
    clients = SyntheticClasses(clients=3, samples=4000, dim=8, classes=4, model_spread=1.0, test=0.2).make(1)
    for i in range(3):
        x, y = clients.train.of(i)
        assert torch.equal(clients.truth.labels(x, i), y)
        assert np.allclose(x.var(0), np.arange(1, 9) ** -1.2, rtol=0.12)  # variances, not deviations
        assert set(y.tolist()) <= {0, 1, 2, 3} and len(clients.classes) == 4
    # 8 * 4 + 4 entries scatter around u_i with unit variance, u_i around 0 with deviation model_spread
    many = SyntheticClasses(clients=400, samples=2, dim=8, classes=4, model_spread=2.0, test=0).make(2).truth
    assert many.w.var(1).mean() == pytest.approx(1, rel=0.05)
    assert many.w.mean(1).std() == pytest.approx(2, rel=0.1)


def test_synthetic_classes_modes():
    base = SyntheticClasses(clients=5, samples=20, dim=4, classes=3)
    assert replace(base, iid=True).make().truth.diameter == 0
    assert base.make().truth.diameter > 1  # Synthetic(0, 0) is not iid
    as_std = replace(base, model_spread=0.5, input_spread=0.5).make()
    as_var = replace(base, model_spread=0.25, input_spread=0.25, spreads="var").make()
    assert same(arrays(as_std, "train"), arrays(as_var, "train"))
    sizes = replace(base, clients=400, samples="lognormal", most=10**5, test=0).make().train.size.numpy() - 50
    assert sizes.min() >= 0
    assert np.median(np.log(sizes + 0.5)) == pytest.approx(4, abs=0.4)
    assert np.log(sizes + 0.5).std() == pytest.approx(2, abs=0.3)
    assert replace(base, clients=100, samples="lognormal", test=0).make().train.size.max() == 1000


def test_synthetic_logit_follows_the_recipe():
    clients = SyntheticLogit(clients=2, samples=40_000, dim=4, spread=0.7, ridge=0.0).make(5)
    for i in range(2):
        x, y = (part.numpy() for part in clients.train.of(i))
        planted = clients.truth.planted[i].numpy()
        assert np.allclose(x.var(0), np.arange(1, 5) ** -1.2, rtol=0.05)
        assert np.allclose(x.mean(0), clients.truth.inputs.mean[i], atol=0.03)
        assert np.abs(x.T @ (y - expit(x @ planted))).max() / len(y) < 0.015  # the planted w is stationary
    assert torch.equal(clients.truth.w, clients.truth.planted)


def test_synthetic_logit_spread_rescales_the_same_truths():
    base = SyntheticLogit(clients=30, samples=5, dim=4, ridge=0.0)
    none, one, two = (replace(base, spread=s).make(2).truth.planted for s in (0.0, 1.0, 2.0))
    assert torch.allclose(two - none, 2 * (one - none)) and (none == none[0]).all()
    assert (one - none).std() == pytest.approx(1, rel=0.15)
    assert replace(base, spread=0.0, centred=False).make(2).truth.planted.abs().max() == 0


def test_the_ridge_truth_is_what_large_samples_find():
    from mooring.tasks.logistic import Logistic

    clients = SyntheticLogit(clients=2, samples=200_000, dim=3, ridge=0.05).make(1)
    found = Logistic(features=3, intercept=False, ridge=0.05).solve(clients.train.padded())
    assert torch.allclose(found, clients.truth.w, atol=0.03)
    assert (clients.truth.w - clients.truth.planted).norm(dim=1).min() > 0.1  # and the planted vector is not


def test_hard_prior():
    n = np.array([25, 100, 400])
    far = HardLogistic(clients=3, samples=tuple(n), dim=4, radius=1.0).make(0)  # 1 >= 4 * 3 / 525
    scale = 1 / (2 * np.sqrt(2))
    assert np.allclose(far.truth.w.abs(), (scale / np.sqrt(n))[:, None])
    near = HardLogistic(clients=3, samples=tuple(n), dim=4, radius=0.1).make(0)  # 0.01 < 12 / 525
    assert np.allclose(near.truth.w.abs(), scale * 0.1 / 2)
    assert torch.equal(far.truth.w.sign(), near.truth.w.sign())
    for clients, radius in ((far, 1.0), (near, 0.1)):
        assert clients.truth.r_rms <= radius  # (A.2)
        assert clients.train.x.abs().max() <= 1
    signs = HardLogistic(clients=100, samples=2, dim=4).make(1).truth.w.sign()
    assert signs.mean(0).abs().max() < 0.4


def test_smooth_family_has_the_radius_and_bounded_inputs():
    made = HardLogistic(
        clients=5, samples=(10, 20, 30, 40, 5000), dim=3, family="smooth", radius=0.8, inputs="rademacher"
    )
    truth = made.make(0).truth
    assert truth.r_max == pytest.approx(0.8)
    assert torch.allclose(truth.average, replace(made, radius=0.0).make(0).truth.w[0])
    x, y = made.make(0).train.of(4)
    assert set(x.unique().tolist()) == {-1.0, 1.0}
    residual = y - torch.sigmoid(x @ truth.w[4])
    assert (x.T @ residual).abs().max() / len(y) < 0.03


def test_linear_federation_is_the_random_effects_model():
    spread = (0.0, 0.5, 2.0)
    clients = LinearFederation(clients=500, samples=5, dim=2, spread=spread, noise=0.3, intercept=True).make(0)
    truth = clients.truth
    assert np.allclose((truth.w - truth.centre).std(0), spread, rtol=0.12)
    assert torch.allclose(truth.spread, torch.tensor(spread).double()) and clients.train.x.shape[1] == 2
    fitted = torch.cat([clients.train.of(i)[0] @ truth.w[i, :2] + truth.w[i, 2] for i in range(500)])
    assert (clients.train.y - fitted).std() == pytest.approx(0.3, rel=0.06)
    sizes = LinearFederation(clients=20, samples=40, sizes="powerlaw", exponent=1.2, least=3).make().train.size
    assert sizes.sum() == 800 and sizes.min() >= 3 and sizes.max() > 5 * sizes.min()


def test_the_bayes_oracle_of_a_linear_federation_beats_both_extremes():
    clients = LinearFederation(clients=100, samples=12, dim=6, spread=0.6).make(1)
    truth = clients.truth
    alone, oracle = [], []
    for i in range(100):
        x, y = clients.train.of(i)
        alone.append(torch.linalg.solve(x.T @ x, x.T @ y))
        pull = torch.diag(truth.noise**2 / truth.spread**2)
        oracle.append(torch.linalg.solve(x.T @ x + pull, x.T @ y + pull @ truth.centre))
    risk = {name: truth.excess_risk(v).mean() for name, v in
            {"alone": torch.stack(alone), "common": truth.centre, "oracle": torch.stack(oracle)}.items()}  # fmt: skip
    assert risk["oracle"] < 0.9 * min(risk["alone"], risk["common"])


def test_section_7_1_constants():
    """eta * lambda_max(X_i'X_i / n_i) is about 0.214, and the pooled least-squares error about sigma sqrt(d / N)."""
    clients = stationarity_setup().make(0)
    xs = [clients.train.of(i)[0] for i in range(25)]
    top = max(float(torch.linalg.eigvalsh(x.T @ x / 500)[-1]) for x in xs)
    assert len(clients) == 25 and 0.1 * top == pytest.approx(0.214, abs=0.008)
    found = torch.linalg.lstsq(clients.train.x, clients.train.y[:, None]).solution[:, 0]
    assert float((found - clients.truth.w[0]).norm()) == pytest.approx(0.0467, rel=0.2)
    assert clients.truth.w[0].norm() == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("mode", ["probe_vs_rest", "gaussian", "probe_moved", "two_cluster"])
def test_section_7_2_truths_are_gap_apart(mode):
    truth = model_heterogeneity(2.5, mode, probe=3).make(0).truth
    common = model_heterogeneity(0.0, mode, probe=3).make(0).truth.w[0]
    assert truth.diameter == pytest.approx(2.5)
    away = (truth.w - common).norm(dim=1)
    rest = torch.arange(20) != 3
    if mode == "probe_vs_rest":
        assert away[3] == 0 and torch.allclose(away[rest], torch.tensor(2.5).double())
    if mode == "probe_moved":
        assert away[3] == pytest.approx(2.5) and (away[rest] == 0).all()
    if mode == "two_cluster":
        assert torch.allclose(away, torch.tensor(1.25).double())
        assert torch.equal(truth.w[0], truth.w[2]) and torch.equal(truth.w[1], truth.w[19])
    if mode == "gaussian":
        assert len(truth.w.unique(dim=0)) == 20


def test_section_7_3_supports():
    clients = covariate_heterogeneity(20).make(0)
    assert clients.train.size.tolist() == [50] * 10 + [500] * 10 and clients.truth.diameter == 0
    supports = []
    for i in range(20):
        x = clients.train.of(i)[0]
        support = x.abs().sum(0) > 0
        assert support.sum() == 20
        assert torch.allclose(clients.truth.second_moment[i], torch.diag(5.0 * support.double()))
        supports.append(tuple(support.tolist()))
    assert len(set(supports)) == 20
    assert clients.train.x.square().sum(1).mean() == pytest.approx(100, rel=0.05)  # rows of norm sqrt(d)


@pytest.mark.parametrize(("design", "n"), [("subspace", 3000), ("orthogonal", 4)])
def test_subspace_designs(design, n):
    clients = LinearKernel(clients=3, samples=n, dim=12, design=design, rank=4, test=2000).make(0)
    for i in range(3):
        x = clients.train.of(i)[0]
        moment = x.T @ x / n
        assert torch.linalg.matrix_rank(x) == 4
        assert (moment - clients.truth.second_moment[i]).abs().max() < (1e-9 if design == "orthogonal" else 0.2)
        held = clients.test.of(i)[0]
        assert (held.T @ held / 2000 - clients.truth.second_moment[i]).abs().max() < 0.3
        if design == "orthogonal":
            assert torch.allclose(x @ x.T, 12 * torch.eye(4).double())  # orthogonal rows of norm sqrt(d)
    assert not torch.allclose(clients.truth.second_moment[0], clients.truth.second_moment[1])


def test_chebyshev_grid_and_target():
    assert np.allclose(np.polyval(U5[::-1], np.linspace(-1, 1, 9)), eval_chebyu(5, np.linspace(-1, 1, 9)))
    clients = Chebyshev(samples=3, noise=0.0, test=1000).make()
    assert np.allclose(clients.train.x[:, 1], -1 + 2 * np.arange(60) / 60)
    assert np.allclose(clients.train.y, eval_chebyu(5, clients.train.x[:, 1].numpy()))
    middle = Chebyshev(samples=3, grid="midpoint").make().train.x[:, 1]
    assert np.allclose(middle, -1 + 2 * (np.arange(60) + 0.5) / 60)
    assert clients.test.x[:, 1].abs().max() <= 1 and clients.test.x[:, 1].std() == pytest.approx(3**-0.5, rel=0.02)


def test_chebyshev_distance_is_the_integral():
    w = torch.tensor([0.3, 5.0, -1.0, -30.0, 2.0, 31.0]).double()
    exact = quad(lambda x: (np.polyval(w.numpy()[::-1], x) - eval_chebyu(5, x)) ** 2, -1, 1)[0]
    assert float(squared_distance(w)) == pytest.approx(exact)
    truth = Chebyshev().make().truth
    assert float(truth.excess_risk(w)[0]) == pytest.approx(exact / 4)  # half the squared error, density 1/2


def test_chebyshev_least_squares_error():
    """Pooled least squares on the draws has the expected error sigma^2 tr(G (X'X)^-1), and 1/(error N) is about 1/3."""
    x = Chebyshev(samples=10).make().train.x
    root = torch.linalg.cholesky(0.25 * torch.linalg.inv(x.T @ x))
    expected = float(squared_distance(torch.tensor(U5).double() + root.T).sum())
    assert 1 / (expected * 200) == pytest.approx(1 / 3, abs=0.01)
    responses = torch.stack([Chebyshev(samples=10).make(seed).train.y for seed in range(60)], dim=1)
    errors = squared_distance(torch.linalg.lstsq(x, responses).solution.T)
    assert float(errors.mean()) == pytest.approx(expected, abs=4 * float(errors.std()) / 60**0.5)


def test_prototypes_bayes_accuracy_between_two_classes():
    clients = Prototypes(clients=2, samples=20_000, dim=6, classes=2, distance=2.0, style=1.5, test=0).make(0)
    points = clients.truth.weight[0].T
    apart = float((points[0] - points[1]).norm())
    for i in range(2):
        x, y = clients.train.of(i)
        right = (clients.truth.labels(x, i) == y).double().mean()
        assert float(right) == pytest.approx(norm.cdf(apart / 2), abs=0.01)
        shift = torch.stack([x[y == c].mean(0) - points[c] for c in (0, 1)])
        assert torch.allclose(shift, clients.truth.w[i].expand(2, -1), atol=0.06)


def test_prototypes_keep_to_the_clients_classes():
    clients = Prototypes(clients=6, samples=60, classes=5, classes_per_client=2, dim=8).make(0)
    for i in range(6):
        held = set(clients.train.of(i)[1].tolist())
        assert len(held) == 2 and held == set(torch.isfinite(clients.truth.bias[i]).nonzero()[:, 0].tolist())
        assert set(clients.truth.labels(clients.test.of(i)[0], i).tolist()) <= held


def test_words_follow_the_planted_distribution():
    clients = BagOfWords(clients=2, samples=4000, words=15, length=10, test=0).make(0)
    theta = clients.truth.weight.exp()
    assert torch.allclose(theta.sum(1), torch.ones(2, 2).double())
    for i in range(2):
        x, y = clients.train.of(i)
        assert (x.sum(1) == 10).all()
        for c in (0, 1):
            assert torch.allclose(x[y == c].mean(0) / 10, theta[i, :, c], atol=0.015)
        right = [(clients.truth.labels(x, k) == y).double().mean() for k in (i, 1 - i)]
        assert right[0] > 0.7 and right[1] < right[0] - 0.02  # one's own rule is Bayes'
    shared = BagOfWords(clients=3, taste=0.0, topics=1.0).make(0).truth.w
    slopes = shared[:, :-1]
    assert torch.allclose(
        slopes - slopes.mean(1, keepdim=True), (slopes - slopes.mean(1, keepdim=True))[0].expand(3, -1)
    )


def test_streams_of_all_clients_at_once_are_those_of_each():
    for i, rng in enumerate(client_generators(5, 4, ROWS_STREAM)):
        assert rng.random() == client_generator(5, i, ROWS_STREAM).random()
