"""Plain loops of torch.optim that do what each algorithm does with an optimizer, on all rows of every client.

A client's model is one vector: a network 3-4-3 with tanh. Every function takes a `Federation` and yields nothing but
returns (the server's model, the clients' models [m, d]) after its rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

INPUTS, HIDDEN, CLASSES = 3, 4, 3
SHAPES = ((HIDDEN, INPUTS), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
BODY = HIDDEN * INPUTS + HIDDEN
D = BODY + CLASSES * HIDDEN + CLASSES
HEAD_MASK = torch.arange(D) >= BODY


def split(v: Tensor) -> list[Tensor]:
    parts = v.split([torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES)]


def represent(v: Tensor, x: Tensor) -> Tensor:
    a, b, _, _ = split(v)
    return torch.tanh(x @ a.T + b)


def scores(v: Tensor, x: Tensor) -> Tensor:
    _, _, c, d = split(v)
    return represent(v, x) @ c.T + d


class Model:
    """One model of one client: a parameter and its optimizer, which is made anew in every round unless it is kept."""

    def __init__(self, make: Callable, clip: float, keep: bool):
        self.make, self.clip, self.keep = make, clip, keep
        self.v = self.optimizer = None

    def begin(self, start: Tensor) -> "Model":
        if self.v is None or not self.keep:
            self.v = torch.nn.Parameter(start.detach().clone())
            self.optimizer = self.make([self.v])
        with torch.no_grad():
            self.v.copy_(start)
        return self

    def step(self, gradient: Tensor, rate: float, fixed: Tensor | None = None) -> None:
        """A step of torch.optim; coefficients in `fixed` are in none of its parameters."""
        before = self.v.detach().clone()
        self.v.grad = gradient.detach().clone()
        if fixed is not None:
            self.v.grad[fixed] = 0.0
        if self.clip:
            torch.nn.utils.clip_grad_norm_([self.v], self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if fixed is not None:
            with torch.no_grad():
                self.v[fixed] = before[fixed]

    @property
    def value(self) -> Tensor:
        return self.v.detach().clone()

    def train(self, start: Tensor, loss: Callable, rate: float, steps: int, fixed: Tensor | None = None) -> Tensor:
        self.begin(start)
        for _ in range(steps):
            self.step(slope(loss, self.value), rate, fixed)
        return self.value


def slope(loss: Callable, v: Tensor) -> Tensor:
    leaf = v.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


@dataclass
class Federation:
    rows: list[tuple[Tensor, Tensor]]
    p: Tensor
    w0: Tensor
    make: Callable  # a list of parameters -> an optimizer of torch
    clip: float
    keep: bool
    rate: Callable  # round -> step size
    fields: dict
    rounds: int = 2
    steps: int = 3
    models: dict = field(default_factory=dict)

    @property
    def losses(self) -> list[Callable]:
        return [lambda v, x=x, y=y: F.cross_entropy(scores(v, x), y) for x, y in self.rows]

    @property
    def clients(self) -> list[tuple[int, Callable]]:
        return list(enumerate(self.losses))

    def model(self, i: int, name: str = "w") -> Model:
        return self.models.setdefault((i, name), self.fresh())

    def fresh(self) -> Model:
        return Model(self.make, self.clip, self.keep)

    def mean(self, values: list[Tensor]) -> Tensor:
        return torch.einsum("i,i...->...", self.p, torch.stack(values))

    def tuned(self, w: Tensor, steps: int, fixed: Tensor | None = None) -> Tensor:
        """Fine-tuning of the global model, with the step size of the next round."""
        rate = self.rate(self.rounds + 1)
        return torch.stack([self.fresh().train(w, loss, rate, steps, fixed) for loss in self.losses])


def pulled(loss: Callable, lam: float, center: Tensor, shift: Tensor | float = 0.0) -> Callable:
    return lambda v: loss(v) + lam / 2 * ((v - center) ** 2).sum() + (shift * v).sum()


def fedavg(f: Federation) -> tuple[Tensor, Tensor]:
    w = f.w0
    for t in range(1, f.rounds + 1):
        w = f.mean([f.model(i).train(w, loss, f.rate(t), f.steps) for i, loss in f.clients])
    return w, w.expand(len(f.rows), -1)


def fedavg_finetune(f: Federation) -> tuple[Tensor, Tensor]:
    w, _ = fedavg(f)
    return w, f.tuned(w, f.fields["tune_steps"])


def local(f: Federation) -> tuple[Tensor, Tensor]:
    v = [f.w0] * len(f.rows)
    for t in range(1, f.rounds + 1):
        v = [f.model(i).train(v[i], pulled(loss, 0.1, 0 * v[i]), f.rate(t), f.steps) for i, loss in f.clients]
    return f.w0, torch.stack(v)


def pooled(f: Federation) -> tuple[Tensor, Tensor]:
    w = f.w0
    for t in range(1, f.rounds + 1):
        w = f.model(0).train(w, lambda v: sum(p * loss(v) for p, loss in zip(f.p, f.losses)), f.rate(t), f.steps)
    return w, w.expand(len(f.rows), -1)


def dichotomous(f: Federation) -> tuple[Tensor, Tensor]:
    """With a radius so large that every client uses its local model."""
    return fedavg(f)[0], local(f)[1] if not f.keep else _apart(f, local)


def _apart(f: Federation, run: Callable) -> Tensor:
    other = Federation(f.rows, f.p, f.w0, f.make, f.clip, f.keep, f.rate, f.fields)
    return run(other)[1]


def fedprox(f: Federation) -> tuple[Tensor, Tensor]:
    w = f.w0
    for t in range(1, f.rounds + 1):
        w = f.mean([f.model(i).train(w, pulled(loss, 0.3, w), f.rate(t), f.steps) for i, loss in f.clients])
    return w, w.expand(len(f.rows), -1)


def fedprox_personal(f: Federation) -> tuple[Tensor, Tensor]:
    w, v = f.w0, [f.w0] * len(f.rows)
    for t in range(1, f.rounds + 1):
        v = [f.model(i).train(v[i], pulled(loss, 0.3, w), f.rate(t), f.steps) for i, loss in f.clients]
        w = w - f.fields["gamma"] * f.mean([0.3 * (w - own) for own in v])
    return w, torch.stack(v)


def fedprox_two_stage(f: Federation) -> tuple[Tensor, Tensor]:
    w, v = fedprox_personal(f)
    last = [
        f.fresh().train(v[i], pulled(loss, 0.3, w), f.rate(f.rounds), f.fields["final_steps"]) for i, loss in f.clients
    ]
    return w, torch.stack(last)


def ditto(f: Federation) -> tuple[Tensor, Tensor]:
    w, v = f.w0, [f.w0] * len(f.rows)
    for t in range(1, f.rounds + 1):
        v = [f.model(i, "v").train(v[i], pulled(loss, 0.3, w), f.rate(t), f.steps) for i, loss in f.clients]
        w = f.mean([f.model(i).train(w, loss, f.rate(t), f.steps) for i, loss in f.clients])
    return w, torch.stack(v)


def apfl(f: Federation) -> tuple[Tensor, Tensor]:
    w, v, alpha = f.w0, [f.w0] * len(f.rows), f.fields["alpha"]
    for t in range(1, f.rounds + 1):
        common = []
        for i, loss in f.clients:
            own, shared = f.model(i, "v").begin(v[i]), f.model(i).begin(w)
            for _ in range(f.steps):
                at_mixture = slope(loss, alpha * own.value + (1 - alpha) * shared.value)
                at_shared = slope(loss, shared.value)
                own.step(alpha * at_mixture, f.rate(t))
                shared.step(at_shared, f.rate(t))
            v[i] = own.value
            common.append(shared.value)
        w = f.mean(common)
    return w, torch.stack([alpha * own + (1 - alpha) * w for own in v])


def _personal_part(f: Federation, mask: Tensor, head_steps: int = 0) -> tuple[Tensor, Tensor]:
    w, own = f.w0, [f.w0] * len(f.rows)
    for t in range(1, f.rounds + 1):
        for i, loss in f.clients:
            v, fixed = torch.where(mask, own[i], w), None
            if head_steps:
                v, fixed = f.model(i, "head").train(v, loss, f.rate(t), head_steps, ~mask), mask
            own[i] = f.model(i).train(v, loss, f.rate(t), f.steps, fixed)
        w = torch.where(mask, w, f.mean(own))
    return w, torch.stack([torch.where(mask, v, w) for v in own])


def fedper(f: Federation) -> tuple[Tensor, Tensor]:
    return _personal_part(f, HEAD_MASK)


def lg_fedavg(f: Federation) -> tuple[Tensor, Tensor]:
    return _personal_part(f, ~HEAD_MASK)


def fedbn(f: Federation) -> tuple[Tensor, Tensor]:
    """With the first layer as the personal part, since the network has no normalization."""
    return _personal_part(f, ~HEAD_MASK)


def fedrep(f: Federation) -> tuple[Tensor, Tensor]:
    steps = f.fields["head_steps"]
    w, models = _personal_part(f, HEAD_MASK, steps)
    rate = f.rate(f.rounds + 1)
    refitted = [f.model(i, "head").train(models[i], loss, rate, steps, ~HEAD_MASK) for i, loss in f.clients]
    return w, torch.stack(refitted)


def fedbabu(f: Federation) -> tuple[Tensor, Tensor]:
    w = f.w0
    for t in range(1, f.rounds + 1):
        w = f.mean([f.model(i).train(w, loss, f.rate(t), f.steps, HEAD_MASK) for i, loss in f.clients])
    return w, f.tuned(w, f.fields["tune_steps"])


def fedala(f: Federation) -> tuple[Tensor, Tensor]:
    w, v, a = f.w0, [f.w0] * len(f.rows), [torch.ones(D, dtype=f.w0.dtype) for _ in f.rows]
    for t in range(1, f.rounds + 1):
        for i, loss in f.clients:
            for _ in range((0, f.fields["first_passes"], 1)[min(t - 1, 2)]):
                at = torch.where(HEAD_MASK, v[i] + (w - v[i]) * a[i], w)
                moved = (a[i] - slope(loss, at) * (w - v[i])).clamp(0, 1)
                a[i] = torch.where(HEAD_MASK, moved, a[i])
            v[i] = f.model(i).train(v[i] + (w - v[i]) * a[i], loss, f.rate(t), f.steps)
        w = f.mean(v)
    return w, torch.stack(v)


def feddyn(f: Federation) -> tuple[Tensor, Tensor]:
    w, h, lam = f.w0, torch.zeros_like(f.w0), 0.3
    g = [torch.zeros_like(w)] * len(f.rows)
    for t in range(1, f.rounds + 1):
        v = [f.model(i).train(w, pulled(loss, lam, w, -g[i]), f.rate(t), f.steps) for i, loss in f.clients]
        g = [own - lam * (model - w) for own, model in zip(g, v)]
        h = h - lam * (f.mean(v) - w)
        w = f.mean(v) - h / lam
    return w, w.expand(len(f.rows), -1)


def fedrod(f: Federation) -> tuple[Tensor, Tensor]:
    w, h = f.w0, [torch.zeros_like(f.w0)] * len(f.rows)
    for t in range(1, f.rounds + 1):
        common = []
        for i, (x, y) in enumerate(f.rows):
            prior = torch.bincount(y, minlength=CLASSES).to(w.dtype).clamp(min=1e-9).log()
            shared, own = f.model(i).begin(w), f.model(i, "head").begin(h[i])
            for _ in range(f.steps):
                at_shared = slope(
                    lambda v, x=x, y=y, prior=prior: F.cross_entropy(scores(v, x) + prior, y), shared.value
                )
                at_both = slope(f.losses[i], shared.value + own.value)
                own.step(at_both, f.rate(t), ~HEAD_MASK)
                shared.step(at_shared, f.rate(t))
            h[i] = own.value
            common.append(shared.value)
        w = f.mean(common)
    return w, torch.stack([w + own for own in h])


def moon(f: Federation) -> tuple[Tensor, Tensor]:
    w, last, mu, tau = f.w0, [f.w0] * len(f.rows), f.fields["mu"], f.fields["tau"]
    for t in range(1, f.rounds + 1):
        for i, (x, _) in enumerate(f.rows):

            def loss(u: Tensor, i=i, x=x, far=last[i], near=w) -> Tensor:
                similar, apart = (F.cosine_similarity(represent(u, x), represent(v, x)) / tau for v in (near, far))
                return f.losses[i](u) + mu * -torch.log(similar.exp() / (similar.exp() + apart.exp())).mean()

            last[i] = f.model(i).train(w, loss, f.rate(t), f.steps)
        w = f.mean(last)
    return w, w.expand(len(f.rows), -1)


def knn_per(f: Federation) -> tuple[Tensor, Tensor]:
    w, _ = fedavg(f)
    room = max(len(y) for _, y in f.rows)
    models = []
    for x, y in f.rows:
        about = torch.tensor([f.fields["alpha"], len(y)], dtype=w.dtype)
        keys = F.pad(represent(w, x), (0, 0, 0, room - len(y)))
        models.append(torch.cat([w, about, keys.flatten(), F.pad(y.to(w.dtype), (0, room - len(y)))]))
    return w, torch.stack(models)


def ifca(f: Federation) -> tuple[Tensor, Tensor]:
    """With one cluster."""
    return fedavg(f)


def per_fedavg(f: Federation) -> tuple[Tensor, Tensor]:
    """First order."""
    w, inner = f.w0, f.fields["inner_eta"]
    for t in range(1, f.rounds + 1):
        for i, loss in f.clients:
            model = f.model(i).begin(w)
            for _ in range(f.steps):
                model.step(slope(loss, model.value - inner * slope(loss, model.value)), f.rate(t))
        w = f.mean([f.model(i).value for i, _ in f.clients])
    return w, torch.stack([w - inner * slope(loss, w) for loss in f.losses])


def pfedme(f: Federation) -> tuple[Tensor, Tensor]:
    w, v, lam = f.w0, [f.w0] * len(f.rows), 0.3
    for t in range(1, f.rounds + 1):
        common = []
        for i, loss in f.clients:
            w_i, theta = w, f.model(i).begin(v[i])
            for _ in range(f.steps):
                for _ in range(f.fields["inner_steps"]):
                    theta.step(slope(pulled(loss, lam, w_i), theta.value), f.fields["inner_eta"])
                w_i = w_i - f.rate(t) * lam * (w_i - theta.value)
            v[i] = theta.value
            common.append(w_i)
        w = f.mean(common)
    return w, torch.stack(v)


def scaffold(f: Federation) -> tuple[Tensor, Tensor]:
    """With weight decay only: control variates are those of the loss with a ridge."""
    decay = f.make([torch.nn.Parameter(f.w0)]).defaults["weight_decay"]
    w, c, own = f.w0, torch.zeros_like(f.w0), [torch.zeros_like(f.w0)] * len(f.rows)
    for t in range(1, f.rounds + 1):
        y, before = [w] * len(f.rows), c
        for i, loss in f.clients:
            for _ in range(f.steps):
                y[i] = y[i] - f.rate(t) * (slope(pulled(loss, decay, 0 * w), y[i]) - own[i] + before)
            new = own[i] - before + (w - y[i]) / (f.steps * f.rate(t))
            c, own[i] = c + f.p[i] * (new - own[i]), new
        w = f.mean(y)
    return w, w.expand(len(f.rows), -1)


def scaffold_finetune(f: Federation) -> tuple[Tensor, Tensor]:
    w, _ = scaffold(f)
    return w, f.tuned(w, f.fields["tune_steps"])
