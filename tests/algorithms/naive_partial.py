"""Naive transcriptions of the methods that share a part of the model, of FedDyn and of IFCA.

The model has three slopes and an intercept: the intercept is the head.
"""

import numpy as np

from mooring.core.seeds import uniforms
from tests.algorithms.naive import ETA, LAM, ROUNDS, D

HEAD = np.array([False, False, False, True])
BODY = ~HEAD


def steps(rows, v, moving=None):
    """v after one step per client of `rows`; only the coefficients in `moving` move."""
    for c in rows:
        v = v - ETA * (c.grad(v) if moving is None else np.where(moving, c.grad(v), 0.0))
    return v


def naive_shared(story, own):
    """FedPer: the coefficients in `own` are a client's, the others are averaged."""
    w, v = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        mean = np.zeros(D)
        for i, q in story.share(t).items():
            v[i] = steps(story.rows(i, t), np.where(own, v[i], w))
            mean += q * v[i]
        w = np.where(own, w, mean)
    return w, [np.where(own, one, w) for one in v]


def naive_fedper(story):
    return naive_shared(story, HEAD)


def naive_lg(story):
    return naive_shared(story, BODY)


def naive_fedrep(story, head_steps=3, refit=True):
    w, h = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        mean = np.zeros(D)
        for i, q in story.share(t).items():
            v = steps(story.rows(i, t, head_steps, slot=1), np.where(HEAD, h[i], w), HEAD)
            v = steps(story.rows(i, t), v, BODY)
            h[i], mean = v, mean + q * v
        w = np.where(HEAD, w, mean)
    models = [np.where(HEAD, one, w) for one in h]
    if refit:  # to the body that is deployed, on the rows of the round that would come next
        models = [steps(story.rows(i, ROUNDS, head_steps, slot=1), v, HEAD) for i, v in enumerate(models)]
    return w, models


def naive_fedbabu(story, tune=None):
    w = np.zeros(D)
    for t in range(ROUNDS):
        w = sum(q * steps(story.rows(i, t), w, BODY) for i, q in story.share(t).items())
    return w, [steps(story.rows(i, ROUNDS, 2), w, tune) for i in range(len(story.clients))]


def naive_fedbabu_head(story):
    return naive_fedbabu(story, HEAD)


def naive_fedala(story, first_passes=2, weight_eta=0.7):
    """All of a pass; weights of the intercept only."""
    w, v = np.zeros(D), [np.zeros(D) for _ in story.clients]
    a, updates = [np.ones(D) for _ in v], [0] * len(v)
    for t in range(ROUNDS):
        mean = np.zeros(D)
        for i, q in story.share(t).items():
            n = len(story.clients[i].y)
            passes = [0, first_passes][min(updates[i], 1)] if updates[i] < 2 else 1
            per_pass = 1 if story.batch is None else -(-n // story.batch)
            for c in story.rows(i, t, passes * per_pass, slot=1) if passes else []:
                u = v[i] + (w - v[i]) * a[i]
                moved = np.clip(a[i] - weight_eta * c.grad(u) * (w - v[i]), 0, 1)
                a[i] = np.where(HEAD, moved, a[i])
            v[i] = steps(story.rows(i, t), v[i] + (w - v[i]) * a[i])
            updates[i] += 1
            mean += q * v[i]
        w = mean
    return w, v


def naive_feddyn(story, exact=False):
    w, h, g = np.zeros(D), np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        mean, total = np.zeros(D), np.zeros(D)
        for i, q in story.share(t).items():
            v = w.copy()
            for c in story.rows(i, t):
                v = v - ETA * (c.grad(v) - g[i] + LAM * (v - w))
            if exact:
                v = story.clients[i].prox(w + g[i] / LAM, LAM)
            g[i] = g[i] - LAM * (v - w)
            mean, total = mean + q * v, total + story.p[i] * (v - w)
        h = h - LAM * total
        w = mean - h / LAM
    return w, [w] * len(story.clients)


def naive_feddyn_exact(story):
    return naive_feddyn(story, exact=True)


def naive_fedrod(story):
    """Of squared losses, which are not balanced."""
    w, h = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        mean = np.zeros(D)
        for i, q in story.share(t).items():
            u = w.copy()
            for c in story.rows(i, t):
                u, h[i] = u - ETA * c.grad(u), h[i] - ETA * np.where(HEAD, c.grad(u + h[i]), 0.0)
            mean += q * u
        w = mean
    return w, [w + one for one in h]


def naive_ifca(story, clusters=2):
    m = len(story.clients)
    models = [np.zeros(D) for _ in range(clusters)]
    lots = [uniforms(story.seed, "algorithm", i)[0] for i in range(m)]
    place = {i: k % clusters for k, i in enumerate(sorted(range(m), key=lots.__getitem__))}

    def best(i):
        return int(np.argmin([story.clients[i].loss(w) for w in models]))

    for t in range(ROUNDS):
        weight, total = np.zeros(clusters), np.zeros((clusters, D))
        for i, q in story.share(t).items():
            j = place[i] if t == 0 else best(i)
            weight[j] += q
            total[j] += q * steps(story.rows(i, t), models[j])
        models = [total[j] / weight[j] if weight[j] else w for j, w in enumerate(models)]
    return models[int(np.argmax(weight))], [models[best(i)] for i in range(m)]
