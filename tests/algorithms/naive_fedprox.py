"""Naive transcriptions of the FedProx family and of the dichotomous strategy: one client, one step at a time."""

import numpy as np

from tests.algorithms.naive import ETA, LAM, RIDGE, ROUNDS, STEPS, D
from tests.algorithms.naive_personal import shrunk

RADIUS, FINAL = 1.5, 6
MU, SMOOTH = 0.8, 1.6
TWO_STAGE = {"lam": LAM, "eta": ETA, "steps": STEPS, "final_steps": FINAL, "gamma": 2.0, "radius": RADIUS}
INVERSE = {"lam": LAM, "schedule": "inverse", "mu": MU, "smooth": SMOOTH, "final_steps": FINAL, "radius": RADIUS}


def naive_one_stage(story, gamma=2.0, weights="share", server_decay=0.0):
    """effect, Algorithm 1, with weights that sum to 1 over the cohort or, elastic, to 1 in expectation."""
    w, models = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        pull = np.zeros(D)
        for i, q in getattr(story, weights)(t).items():
            for c in story.rows(i, t):
                models[i] = models[i] - ETA * (c.grad(models[i]) + LAM * (models[i] - w))
            pull += q * LAM * (w - models[i])
        w = w - gamma / (1 + server_decay * t) * pull
    return w, models


MOOR = {"per_client": [0.1, 0.2, 0.3, 0.4, 0.5], "per_coefficient": [1.0, 2.0, 3.0, 4.0]}


def naive_one_stage_moor(story, gamma=0.8):
    """Stationarity of the objective with lam_i: w = sum p_i lam_i v_i / sum p_i lam_i, relaxed by gamma."""
    lam = [a * np.array(MOOR["per_coefficient"]) for a in MOOR["per_client"]]
    w, models = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        for i in story.cohorts[t]:
            models[i] = story.clients[i].prox(w, lam[i])
        q = story.share(t)
        target = sum(q[i] * lam[i] * models[i] for i in q) / sum(q[i] * lam[i] for i in q)
        w = w + gamma * (target - w)
    return w, models


def naive_shared(story):
    """mspp, Eq. 1.3, and Algorithm 1 on the round's minibatch."""
    w = np.zeros(D)
    for t in range(ROUNDS):
        w = sum(q * story.clients[i].prox(w, LAM) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


def naive_mspp(story):
    w = np.zeros(D)
    for t in range(ROUNDS):
        w = sum(q * story.rows(i, t, 1)[0].prox(w, LAM) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


def soft_local_sgd(rows, v, w, rates):
    """alternative, SoftLocalSGD; rows: what each step sees."""
    for c, rate in zip(rows, rates):
        v = shrunk(v - rate * (c.grad(v) + LAM * (v - w)), RADIUS)
    return v


def naive_two_stage(story):
    """alternative, Algorithm 3 with constant steps, elastic weights, w projected too."""
    w, models = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        for i in story.cohorts[t]:
            models[i] = soft_local_sgd(story.rows(i, t), models[i], w, [ETA] * STEPS)
        w = shrunk(w - 2.0 * LAM * sum(q * (w - models[i]) for i, q in story.elastic(t).items()), RADIUS)
    return w, last_stage(story, models, w, [ETA] * FINAL)


def last_stage(story, models, w, rates):
    """K_T more steps at every client, drawn apart from the last round's."""
    rows = [story.rows(i, ROUNDS - 1, FINAL, slot=1) for i in range(len(models))]
    return [soft_local_sgd(mine, v, w, rates) for mine, v in zip(rows, models)]


def naive_two_stage_inverse(story):
    """alternative, Algorithm 3 with the schedules of Theorem 4.4 and Lemma B.2 (losses up to smooth D^2/2)."""
    w, models = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        most = int(np.ceil((4 * t + 20) * max(LAM / MU, SMOOTH / MU) ** 2)) - 1
        rates = [1 / ((MU + LAM) * (k + 1)) for k in range(most)]
        for i in story.cohorts[t]:
            models[i] = soft_local_sgd(story.rows(i, t, most), models[i], w, rates)
        gamma = 2 * (MU + LAM) / (LAM * MU * (t + 1))
        w = shrunk(w - LAM * gamma * sum(q * (w - models[i]) for i, q in story.elastic(t).items()), RADIUS)
    return w, last_stage(story, models, w, [1 / ((MU + LAM) * (k + 1)) for k in range(FINAL)])


def descended(c, w, lam, eta, most, tol):
    v = w.copy()
    for _ in range(most):
        g = c.grad(v) + lam * (v - w)
        if np.linalg.norm(g) <= tol:
            break
        v = v - eta * g
    return v


TOL, MOST = 0.1, 200
DESCENT = {"lam": LAM, "inner": "descent", "eta": ETA, "steps": MOST, "tol": TOL}


def naive_mspp_descent(story):
    """mspp, Algorithm 1 on each round's minibatch, solved by gradient steps up to a certificate."""
    w = np.zeros(D)
    for t in range(ROUNDS):
        w = sum(q * descended(story.rows(i, t, 1)[0], w, LAM, ETA, MOST, TOL) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


L_SHARED, G = 2.0, 0.3
SHARED_THEORY = {"lam": 3 * L_SHARED, "growth": "smooth", "lipschitz": G, "inner": "descent", "steps": 100}
MSPP_THEORY = {"lam": 8 * L_SHARED, "growth": "smooth", "lipschitz": G, "inner": "descent", "steps": 200}


def naive_shared_theory(story):
    """mspp, Theorem 1: proximal step min{T^-1/3, (I/T)^1/2}/(3L), solves certified by min{G/sqrt(I), 2LG eta/I}; with
    everybody Remark 2: T^-1/3/(3L), certified by L^2 G eta^2."""
    w = np.zeros(D)
    for t in range(ROUNDS):
        sampled = len(story.cohorts[t])
        step = min(ROUNDS ** (-1 / 3), (sampled / ROUNDS) ** 0.5) / (3 * L_SHARED)
        tol = min(G / sampled**0.5, 2 * L_SHARED * G * step / sampled)
        if sampled == len(story.clients):
            step = ROUNDS ** (-1 / 3) / (3 * L_SHARED)
            tol = L_SHARED**2 * G * step**2
        lam, eta = 1 / step, shortened(1 / step, 3 * L_SHARED)
        w = sum(q * descended(story.clients[i], w, lam, eta, 100, tol) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


def naive_mspp_theory(story):
    """mspp, Theorem 3: proximal step min{T^-1/3, (bI/T)^1/2}/(8L), solves certified by L G eta/(bI)."""
    w = np.zeros(D)
    for t in range(ROUNDS):
        sampled = len(story.cohorts[t])
        step = min(ROUNDS ** (-1 / 3), (MSPP_BATCH * sampled / ROUNDS) ** 0.5) / (8 * L_SHARED)
        tol = L_SHARED * G * step / (MSPP_BATCH * sampled)
        lam, eta = 1 / step, shortened(1 / step, 8 * L_SHARED)
        rows = {i: story._replace(batch=MSPP_BATCH).rows(i, t, 1)[0] for i in story.cohorts[t]}
        w = sum(q * descended(rows[i], w, lam, eta, 200, tol) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


MSPP_BATCH = 2


def naive_kinked(story):
    """mspp, Theorem 2: proximal step rho/sqrt(T), exact solves."""
    w = np.zeros(D)
    for t in range(ROUNDS):
        w = sum(q * story.clients[i].prox(w, LAM * ROUNDS**0.5) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


def naive_mspp_kinked(story):
    """mspp, Theorem 4."""
    w = np.zeros(D)
    for t in range(ROUNDS):
        w = sum(q * story.rows(i, t, 1)[0].prox(w, LAM * ROUNDS**0.5) for i, q in story.share(t).items())
    return w, [w] * len(story.clients)


def shortened(lam, settled_for):
    """The step ETA of the settings gives way to the larger lam of the horizon."""
    return 1 / (1 / ETA + lam - settled_for)


KNOWN_R = {"variant": "known_r", "mu": 0.1, "ell_max": 1.0, "ridge": 0.2}


def common_fit(story):
    h = sum(q * c.x.T @ c.x / len(c.y) for q, c in zip(story.p, story.clients)) + RIDGE * np.eye(D)
    return np.linalg.solve(h, sum(q * c.x.T @ c.y / len(c.y) for q, c in zip(story.p, story.clients)))


def naive_common(story):
    w = common_fit(story)
    return w, [w] * len(story.clients)


def naive_alone(story):
    return common_fit(story), [c.prox(np.zeros(D), 0.2) for c in story.clients]
