"""Naive transcriptions of the methods with personal models or control variates: one client, one iteration at a time."""

import numpy as np

from mooring.core.seeds import uniforms
from tests.algorithms.naive import ETA, LAM, RIDGE, ROUNDS, STEPS

D = 4


def shrunk(w, radius):
    return w if np.linalg.norm(w) <= radius else w * radius / np.linalg.norm(w)


APFL_ADAPTIVE = {"alpha": 0.4, "adapt": "step", "adapt_on": "train", "alpha_pull": 0.3, "decay": 0.1}


def naive_apfl(clients, p):
    """apfl, Eqs. 5 and 6: alpha from 0.4, adapted on training rows at every step, pulled to 0, eta decayed."""
    w, v, alpha, t = np.zeros(D), [np.zeros(D) for _ in clients], [0.4 for _ in clients], 0
    for _ in range(ROUNDS):
        copies = [w.copy() for _ in clients]
        for k in range(STEPS):
            eta = ETA / (1 + 0.1 * (t + k))
            for i, c in enumerate(clients):
                mixed = alpha[i] * v[i] + (1 - alpha[i]) * copies[i]
                slope = (v[i] - copies[i]) @ c.grad(mixed) + 0.3 * alpha[i]
                v[i], copies[i], alpha[i] = (
                    v[i] - eta * alpha[i] * c.grad(mixed),
                    copies[i] - eta * c.grad(copies[i]),
                    min(max(alpha[i] - eta * slope, 0), 1),
                )
        t += STEPS
        w = sum(q * copy for q, copy in zip(p, copies))
    return w, [a * own + (1 - a) * w for a, own in zip(alpha, v)]


APFL_AVERAGE = {"alpha": 0.7, "adapt": "no", "radius": 0.4, "output": "average", "shift": 3.0, "decay": 0.0}


def naive_apfl_average(clients, p):
    """apfl, Theorem 2: iterates on a ball, the mixture averaged with weights (t + a)^2 and the virtual common model."""
    w, v = np.zeros(D), [np.zeros(D) for _ in clients]
    total, weight, t = [np.zeros(D) for _ in clients], 0.0, 0
    for _ in range(ROUNDS):
        copies = [w.copy() for _ in clients]
        for _ in range(STEPS):
            t += 1
            for i, c in enumerate(clients):
                mixed = 0.7 * v[i] + 0.3 * copies[i]
                v[i] = shrunk(v[i] - ETA * 0.7 * c.grad(mixed), 0.4)
                copies[i] = shrunk(copies[i] - ETA * c.grad(copies[i]), 0.4)
            virtual = sum(q * copy for q, copy in zip(p, copies))
            total = [s + (t + 3.0) ** 2 * (0.7 * own + 0.3 * virtual) for s, own in zip(total, v)]
            weight += (t + 3.0) ** 2
        w = virtual
    return w, [s / weight for s in total]


def naive_scaffold(clients, p):
    w, c, own = np.zeros(D), np.zeros(D), [np.zeros(D) for _ in clients]
    for _ in range(ROUNDS):
        change, shift = np.zeros(D), np.zeros(D)
        for i, (q, client) in enumerate(zip(p, clients)):
            y = w.copy()
            for _ in range(STEPS):
                y = y - ETA * (client.grad(y) - own[i] + c)
            new = own[i] - c + (w - y) / (STEPS * ETA)
            change, shift, own[i] = change + q * (y - w), shift + q * (new - own[i]), new
        w, c = w + 0.9 * change, c + shift
    return w, [w] * len(clients)


def tuned(transcription, steps):
    """The transcription's common model after so many more steps at every client."""

    def localized(clients, p):
        w, _ = transcription(clients, p)
        models = [w] * len(clients)
        for _ in range(steps):
            models = [v - ETA * c.grad(v) for c, v in zip(clients, models)]
        return w, models

    return localized


def naive_ditto(clients, p):
    w, v = np.zeros(D), [np.zeros(D) for _ in clients]
    for _ in range(ROUNDS):
        copies = []
        for i, c in enumerate(clients):
            copy = w.copy()
            for _ in range(STEPS):
                copy = copy - ETA * c.grad(copy)
                v[i] = v[i] - 0.04 * (c.grad(v[i]) + LAM * (v[i] - w))
            copies.append(copy)
        w = sum(q * copy for q, copy in zip(p, copies))
    return w, v


PFEDME = {"lam": LAM, "eta": 0.2, "steps": STEPS, "server_step": 0.8, "inner_eta": 0.04, "inner_steps": 2}


def naive_pfedme(clients, p, exact=False):
    w, v = np.zeros(D), [np.zeros(D) for _ in clients]
    for _ in range(ROUNDS):
        mean = np.zeros(D)
        for i, (q, c) in enumerate(zip(p, clients)):
            copy = w.copy()
            for _ in range(STEPS):
                for _ in range(2):
                    v[i] = v[i] - 0.04 * (c.grad(v[i]) + LAM * (v[i] - copy))
                if exact:
                    v[i] = c.prox(copy, LAM)
                copy = copy - 0.2 * LAM * (copy - v[i])
            mean += q * copy
        w = 0.2 * w + 0.8 * mean
    return w, v


def naive_pfedme_exact(clients, p):
    return naive_pfedme(clients, p, exact=True)


def naive_per_fedavg(clients, p, hessian=True):
    w = np.zeros(D)
    for _ in range(ROUNDS):
        mean = np.zeros(D)
        for q, c in zip(p, clients):
            copy = w.copy()
            bend = c.x.T @ c.x / len(c.y) + RIDGE * np.eye(D) if hessian else np.zeros((D, D))
            for _ in range(STEPS):
                g = c.grad(copy - 0.03 * c.grad(copy))
                copy = copy - ETA * (np.eye(D) - 0.03 * bend) @ g
            mean += q * copy
        w = mean
    models = [w] * len(clients)
    for _ in range(2):
        models = [v - 0.03 * c.grad(v) for c, v in zip(clients, models)]
    return w, models


def naive_per_fedavg_first_order(clients, p):
    return naive_per_fedavg(clients, p, hessian=False)


Q = 0.4


def naive_l2gd(clients, p):
    """Iteration by iteration; a round's coins are heads up to the first tails, then tails up to the next heads."""
    v = [np.zeros(D) for _ in clients]
    for t in range(1, ROUNDS + 1):
        coins = ["heads"]
        while uniforms(0, "algorithm", t, 0, len(coins))[0] < Q:
            coins.append("heads")
        tails = ["tails"]
        while uniforms(0, "algorithm", t, 1, len(tails))[0] >= Q:
            tails.append("tails")
        for coin in coins + tails:
            mean = sum(q * own for q, own in zip(p, v))
            if coin == "heads":
                v = [(1 - ETA * LAM / Q) * own + ETA * LAM / Q * mean for own in v]
            else:
                v = [own - ETA / (1 - Q) * c.grad(own) for own, c in zip(v, clients)]
    return sum(q * own for q, own in zip(p, v)), v
