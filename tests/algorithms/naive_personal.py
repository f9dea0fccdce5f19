"""Naive transcriptions of FedAvg and of the methods with personal models or control variates: one client, one iteration
at a time."""

import numpy as np

from mooring.core.seeds import uniforms
from tests.algorithms.naive import BATCH, ETA, LAM, ROUNDS, STEPS, D

DECAY = 0.2


def shrunk(w, radius):
    return w if np.linalg.norm(w) <= radius else w * radius / np.linalg.norm(w)


def inverse(story, i, t, k, visits):
    """Step sizes by fading: eta / (1 + decay k) over all rounds, and so on."""
    return ETA / (1 + DECAY * (t * STEPS + k))


def by_steps(story, i, t, k, visits):
    return ETA * (1 - DECAY) ** (t * STEPS + k)


def by_rounds(story, i, t, k, visits):
    return ETA * (1 - DECAY) ** t


def by_own_epochs(story, i, t, k, visits):
    """1 - decay for every whole pass that the client has made over its rows, in its own visits."""
    steps_of_a_pass = 1 if story.batch is None else -(-len(story.clients[i].y) // BATCH)
    return ETA * (1 - DECAY) ** ((visits * STEPS + k) // steps_of_a_pass)


def by_horizon(story, i, t, k, visits):
    return ETA / np.sqrt(ROUNDS * STEPS)


def constant(story, i, t, k, visits):
    return ETA


FADINGS = {"inverse": inverse, "steps": by_steps, "rounds": by_rounds, "epochs": by_own_epochs, "horizon": by_horizon}


def naive_local_sgd(story, rate=constant):
    models, visits = [np.zeros(D) for _ in story.clients], [0] * len(story.clients)
    for t in range(ROUNDS):
        for i in story.cohorts[t]:
            for k, c in enumerate(story.rows(i, t)):
                models[i] = models[i] - rate(story, i, t, k, visits[i]) * (c.grad(models[i]) + 0.2 * models[i])
            visits[i] += 1
    return np.zeros(D), models


def naive_fedavg(story, weights="share", rate=constant, server_decay=0.0, server_step=0.9):
    """apfl, Section 3 (share), or alternative, Algorithm 1 (elastic), with a server step."""
    w, visits = np.zeros(D), [0] * len(story.clients)
    for t in range(ROUNDS):
        total = np.zeros(D)
        for i, q in getattr(story, weights)(t).items():
            v = w.copy()
            for k, c in enumerate(story.rows(i, t)):
                v = v - rate(story, i, t, k, visits[i]) * c.grad(v)
            total += q * (v - w)
            visits[i] += 1
        w = w + server_step / (1 + server_decay * t) * total
    return w, [w] * len(story.clients)


KNN = {"neighbors": 3, "sigma": 0.7}


def naive_knn_per(story):
    """knnper, Algorithm 1, of numbers: the weight of the neighbors has the least mean square on validation rows."""
    w, _ = naive_fedavg(story, server_step=1.0)
    room, models = max(len(c.y) for c in story.clients), []
    for i, c in enumerate(story.clients):
        x, y = (part.numpy() for part in story.data.validation.of(i))
        errors = []
        for alpha in [k / 10 for k in range(10)]:
            total = 0.0
            for row, target in zip(x, y):
                distance = [np.sqrt(sum((row - key[:-1]) ** 2)) for key in c.x]
                nearest = sorted(range(len(c.y)), key=lambda j: distance[j])[: KNN["neighbors"]]
                weight = [np.exp(-distance[j] / KNN["sigma"]) for j in nearest]
                answer = sum(q * c.y[j] for q, j in zip(weight, nearest)) / sum(weight)
                total += (alpha * answer + (1 - alpha) * (row @ w[:-1] + w[-1]) - target) ** 2
            errors.append(total)
        keys, values = np.zeros((room, D - 1)), np.zeros(room)
        keys[: len(c.y)], values[: len(c.y)] = c.x[:, :-1], c.y
        models.append(np.concatenate([w, [np.argmin(errors) / 10, len(c.y)], keys.ravel(), values]))
    return w, models


APFL_ADAPTIVE = {"alpha": 0.4, "adapt": "step", "adapt_on": "train", "alpha_pull": 0.3, "decay": DECAY}
APFL_FIXED = {"alpha": [0.1, 0.3, 0.5, 0.7, 0.9], "adapt": "no", "decay": 0.0, "radius": 0.4}


def naive_apfl(story, begin=(0.4,) * 5, pull=0.3, rate=inverse, radius=np.inf, adapts=True, by_parts=False, ratio=1.0):
    """apfl, Eqs. 5 and 6: alpha adapted on the training minibatch at every step and pulled to 0, on a ball."""
    m = len(story.clients)
    w, v, alpha, visits = np.zeros(D), [np.zeros(D) for _ in range(m)], list(begin), [0] * m
    for t in range(ROUNDS):
        copies = {i: w.copy() for i in story.cohorts[t]}
        for i in story.cohorts[t]:
            for k, c in enumerate(story.rows(i, t)):
                eta = rate(story, i, t, k, visits[i])
                mixed = alpha[i] * v[i] + (1 - alpha[i]) * copies[i]
                share = alpha[i] ** 2 + (1 - alpha[i]) ** 2 if by_parts else 1.0
                slope = share * (v[i] - copies[i]) @ c.grad(mixed) + pull * alpha[i]
                v[i], copies[i], alpha[i] = (
                    shrunk(v[i] - ratio * eta * alpha[i] * c.grad(mixed), radius),
                    shrunk(copies[i] - eta * c.grad(copies[i]), radius),
                    min(max(alpha[i] - eta * slope, 0), 1) if adapts else alpha[i],
                )
            visits[i] += 1
        w = sum(q * copies[i] for i, q in story.share(t).items())
    return w, [a * own + (1 - a) * w for a, own in zip(alpha, v)]


def naive_apfl_fixed(story):
    return naive_apfl(story, APFL_FIXED["alpha"], rate=constant, radius=0.4, adapts=False)


APFL_AVERAGE = {"alpha": 0.7, "adapt": "no", "radius": 0.4, "output": "average", "shift": 3.0, "decay": 0.0}


def naive_apfl_average(story):
    """apfl, Theorem 2: iterates on a ball, the mixture averaged with weights (t + a)^2 and the virtual common model."""
    w, v = np.zeros(D), [np.zeros(D) for _ in story.clients]
    total, weight, now = [np.zeros(D) for _ in story.clients], 0.0, 0
    for t in range(ROUNDS):
        copies = {i: w.copy() for i in story.cohorts[t]}
        rows = {i: story.rows(i, t) for i in story.cohorts[t]}
        for k in range(STEPS):
            now += 1
            for i in story.cohorts[t]:
                c = rows[i][k]
                mixed = 0.7 * v[i] + 0.3 * copies[i]
                v[i] = shrunk(v[i] - ETA * 0.7 * c.grad(mixed), 0.4)
                copies[i] = shrunk(copies[i] - ETA * c.grad(copies[i]), 0.4)
            virtual = sum(q * copies[i] for i, q in story.share(t).items())
            total = [s + (now + 3.0) ** 2 * (0.7 * own + 0.3 * virtual) for s, own in zip(total, v)]
            weight += (now + 3.0) ** 2
        w = virtual
    return w, [s / weight for s in total]


def naive_scaffold(story, rate=constant, server_decay=0.0):
    """Option II; c moves by the cohort's part of all clients."""
    w, c, own = np.zeros(D), np.zeros(D), [np.zeros(D) for _ in story.clients]
    visits = [0] * len(story.clients)
    for t in range(ROUNDS):
        change, shift = np.zeros(D), np.zeros(D)
        for i, q in story.share(t).items():
            y, travelled = w.copy(), 0.0
            for k, client in enumerate(story.rows(i, t)):
                eta = rate(story, i, t, k, visits[i])
                y, travelled = y - eta * (client.grad(y) - own[i] + c), travelled + eta
            new = own[i] - c + (w - y) / travelled
            change, shift, own[i] = change + q * (y - w), shift + story.p[i] * (new - own[i]), new
            visits[i] += 1
        w, c = w + 0.9 / (1 + server_decay * t) * change, c + shift
    return w, [w] * len(story.clients)


def tuned(transcription, steps):
    """The transcription's common model after so many more steps at every client, with the draws of the next round."""

    def localized(story):
        w, _ = transcription(story)
        models = [w] * len(story.clients)
        for i in range(len(models)):
            for c in story.rows(i, ROUNDS, steps):
                models[i] = models[i] - ETA * c.grad(models[i])
        return w, models

    return localized


def naive_ditto(story):
    w, v = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        copies = {}
        for i in story.cohorts[t]:
            copy = w.copy()
            for k, c in enumerate(story.rows(i, t)):
                fade = 1 + DECAY * (t * STEPS + k)
                copy = copy - ETA / fade * c.grad(copy)
                v[i] = v[i] - 0.04 / fade * (c.grad(v[i]) + LAM * (v[i] - w))
            copies[i] = copy
        w = sum(q * copies[i] for i, q in story.share(t).items())
    return w, v


PFEDME = {"lam": LAM, "eta": 0.2, "steps": STEPS, "server_step": 0.8, "inner_eta": 0.04, "inner_steps": 2}


def naive_pfedme(story, exact=False):
    w, v = np.zeros(D), [np.zeros(D) for _ in story.clients]
    for t in range(ROUNDS):
        mean = np.zeros(D)
        for i, q in story.share(t).items():
            copy = w.copy()
            for k, c in enumerate(story.rows(i, t)):
                for _ in range(2):
                    v[i] = v[i] - 0.04 * (c.grad(v[i]) + LAM * (v[i] - copy))
                if exact:
                    v[i] = c.prox(copy, LAM)
                copy = copy - 0.2 / (1 + DECAY * (t * STEPS + k)) * LAM * (copy - v[i])
            mean += q * copy
        w = w + 0.8 / (1 + 0.5 * t) * (mean - w)
    return w, v


def naive_pfedme_exact(story):
    return naive_pfedme(story, exact=True)


def naive_per_fedavg(story, hessian=True):
    w = np.zeros(D)
    for t in range(ROUNDS):
        mean = np.zeros(D)
        for i, q in story.share(t).items():
            copy = w.copy()
            inner, outer, third = (story.rows(i, t, slot=slot) for slot in range(3))
            for k in range(STEPS):
                bend = third[k].bend() if hessian else np.zeros((D, D))
                g = outer[k].grad(copy - 0.03 * inner[k].grad(copy))
                copy = copy - ETA / (1 + DECAY * (t * STEPS + k)) * (np.eye(D) - 0.03 * bend) @ g
            mean += q * copy
        w = mean
    models = [w] * len(story.clients)
    for i in range(len(models)):
        for c in story.rows(i, ROUNDS, 2):
            models[i] = models[i] - 0.03 * c.grad(models[i])
    return w, models


def naive_per_fedavg_first_order(story):
    return naive_per_fedavg(story, hessian=False)


Q = 0.4


def naive_l2gd(story):
    """Iteration by iteration; a round's coins are heads up to the first tails, then tails up to the next heads."""
    v, p = [np.zeros(D) for _ in story.clients], story.p
    for t in range(ROUNDS):
        coins = ["heads"]
        while uniforms(story.seed, "algorithm", t + 1, 0, len(coins))[0] < Q:
            coins.append("heads")
        tails = ["tails"]
        while uniforms(story.seed, "algorithm", t + 1, 1, len(tails))[0] >= Q:
            tails.append("tails")
        rows = [iter(story.rows(i, t, len(tails))) for i in range(len(v))]
        for coin in coins + tails:
            mean = sum(q * own for q, own in zip(p, v))
            if coin == "heads":
                v = [(1 - ETA * LAM / Q) * own + ETA * LAM / Q * mean for own in v]
            else:
                v = [own - ETA / (1 - Q) * next(seen).grad(own) for own, seen in zip(v, rows)]
    return sum(q * own for q, own in zip(p, v)), v
