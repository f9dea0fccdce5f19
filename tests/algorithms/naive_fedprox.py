"""Naive transcriptions of the FedProx family and of the dichotomous strategy: one client, one step at a time."""

import numpy as np

from tests.algorithms.naive import ETA, LAM, RIDGE, ROUNDS, STEPS
from tests.algorithms.naive_personal import shrunk

D = 4
RADIUS, FINAL = 1.5, 6
MU, SMOOTH = 0.8, 1.6
TWO_STAGE = {"lam": LAM, "eta": ETA, "steps": STEPS, "final_steps": FINAL, "gamma": 2.0, "radius": RADIUS}
INVERSE = {"lam": LAM, "schedule": "inverse", "mu": MU, "smooth": SMOOTH, "final_steps": FINAL, "radius": RADIUS}


def soft_local_sgd(c, v, w, steps, rates):
    """alternative, SoftLocalSGD on all rows."""
    for k in range(steps):
        v = shrunk(v - rates[k] * (c.grad(v) + LAM * (v - w)), RADIUS)
    return v


def naive_two_stage(clients, p):
    """alternative, Algorithm 3 with constant steps, everyone sampled, w projected too."""
    w, models = np.zeros(D), [np.zeros(D) for _ in clients]
    for _ in range(ROUNDS):
        models = [soft_local_sgd(c, v, w, STEPS, [ETA] * STEPS) for c, v in zip(clients, models)]
        w = shrunk(w - LAM * 2.0 * sum(q * (w - v) for q, v in zip(p, models)), RADIUS)
    return w, [soft_local_sgd(c, v, w, FINAL, [ETA] * FINAL) for c, v in zip(clients, models)]


def naive_two_stage_inverse(clients, p):
    """alternative, Algorithm 3 with the schedules of Theorem 4.4 and Lemma B.2 (losses up to smooth D^2/2)."""
    w, models = np.zeros(D), [np.zeros(D) for _ in clients]
    for t in range(ROUNDS):
        most = int(np.ceil((4 * t + 20) * max(LAM / MU, SMOOTH / MU) ** 2)) - 1
        rates = [1 / ((MU + LAM) * (k + 1)) for k in range(most)]
        models = [soft_local_sgd(c, v, w, most, rates) for c, v in zip(clients, models)]
        gamma = 2 * (MU + LAM) / (LAM * MU * (t + 1))
        w = shrunk(w - LAM * gamma * sum(q * (w - v) for q, v in zip(p, models)), RADIUS)
    rates = [1 / ((MU + LAM) * (k + 1)) for k in range(FINAL)]
    return w, [soft_local_sgd(c, v, w, FINAL, rates) for c, v in zip(clients, models)]


def descended(c, w, lam, eta, most, tol):
    v = w.copy()
    for _ in range(most):
        g = c.grad(v) + lam * (v - w)
        if np.linalg.norm(g) <= tol:
            break
        v = v - eta * g
    return v


def naive_mspp(clients, p):
    """mspp, Algorithm 1 on whole data sets, solved by gradient steps up to a certificate."""
    w = np.zeros(D)
    for _ in range(ROUNDS):
        w = sum(q * descended(c, w, LAM, ETA, STEPS, 0.4) for q, c in zip(p, clients))
    return w, [w] * len(clients)


L_SHARED, G = 2.0, 0.3
SHARED_THEORY = {"lam": 3 * L_SHARED, "growth": "smooth", "lipschitz": G, "inner": "descent", "steps": 50}


def naive_shared_theory(clients, p):
    """mspp, Theorem 1: proximal step min{T^-1/3, (I/T)^1/2}/(3L), solves certified by min{G/sqrt(I), 2LG eta/I}."""
    prox_step = min(ROUNDS ** (-1 / 3), (len(clients) / ROUNDS) ** 0.5) / (3 * L_SHARED)
    sampled = len(clients)
    tol = min(G / sampled**0.5, 2 * L_SHARED * G * prox_step / sampled)
    w = np.zeros(D)
    for _ in range(ROUNDS):
        w = sum(q * descended(c, w, 1 / prox_step, shortened(1 / prox_step), 50, tol) for q, c in zip(p, clients))
    return w, [w] * len(clients)


def shortened(lam):
    """The step ETA of the settings, made for lam = 3L, gives way to the larger lam."""
    return 1 / (1 / ETA + lam - 3 * L_SHARED)


KNOWN_R = {"variant": "known_r", "mu": 0.1, "ell_max": 1.0, "ridge": 0.2}


def common_fit(clients, p):
    h = sum(q * c.x.T @ c.x / len(c.y) for q, c in zip(p, clients)) + RIDGE * np.eye(D)
    return np.linalg.solve(h, sum(q * c.x.T @ c.y / len(c.y) for q, c in zip(p, clients)))


def naive_common(clients, p):
    w = common_fit(clients, p)
    return w, [w] * len(clients)


def naive_alone(clients, p):
    return common_fit(clients, p), [c.prox(np.zeros(D), 0.2) for c in clients]
