"""Kernel regression: random features of the inputs, then linear regression. No client's row is shared.

    L_i(w) = 1/(2 n_i) sum_j (phi(x_ij)'w - y_ij)^2 + ridge/2 |w|^2,     phi(x)'phi(z) ~ k(x, z)

    fourier   phi(x) = sqrt(2/width) (cos(x'omega_l), sin(x'omega_l)),  l = 1..width/2
              rbf: omega ~ N(0, I/bandwidth^2)     laplace: coordinates Cauchy of scale 1/bandwidth
    nystrom   phi(x) = k(Z, Z)^(-1/2) k(Z, x),  `width` landmarks Z; any kernel

Frequencies and landmarks follow from the seed alone, so that all clients have the same phi and none shows a row: Z is
N(0, I), or uniform on the box [-sqrt 3, sqrt 3]^q; both fit standardised inputs. The error of phi(x)'phi(z) is of order
1/sqrt(width) for fourier; for nystrom it is 0 once the k(., Z) span the kernel's functions (linear, polynomial).
`bandwidth = "auto"` makes k(x, z) about 1/e for two typical standardised rows: sqrt(q) for rbf, q for laplace.

Source   kernel, Section 4 leaves open how clients may share kernels; Rahimi, Recht. Random features for large-scale
         kernel machines. NIPS 2007; Williams, Seeger. Using the Nystrom method to speed up kernel machines. NIPS 2000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from mooring.core.cohort import MAX_PADDED_BYTES, Batch
from mooring.core.errors import RequestError
from mooring.core.seeds import generator
from mooring.core.types import JsonObject
from mooring.tasks import kernel_functions
from mooring.tasks.linear import Linear, Quadratic

FOURIER = ("rbf", "laplace")  # kernels of x - z whose frequencies we can draw
LANDMARKS = ("gaussian", "box")
RANK = 1e-12  # eigenvalues of k(Z, Z) below this share of the largest are left out


@dataclass(frozen=True)
class KernelFeatures:
    """The map phi from rows of `inputs` numbers to rows of `width` numbers."""

    inputs: int
    kernel: str | kernel_functions.Kernel = "rbf"
    width: int = 200
    bandwidth: float | str = "auto"
    degree: int = 2
    method: str = "auto"  # "fourier" for rbf and laplace, "nystrom" for the others
    landmarks: str = "gaussian"  # or "box"
    seed: int = 0

    def __post_init__(self) -> None:
        kernel_functions.find(self.kernel)
        for field, known in (("method", ("auto", "fourier", "nystrom")), ("landmarks", LANDMARKS)):
            if getattr(self, field) not in known:
                raise RequestError(f"task 'kernel': {field} must be one of {known}, got {getattr(self, field)!r}.")
        for field in ("width", "degree"):
            if not (isinstance(getattr(self, field), int) and getattr(self, field) >= 1):
                raise RequestError(f"task 'kernel': {field} must be a whole number >= 1, got {getattr(self, field)!r}.")
        if self.bandwidth != "auto" and not (isinstance(self.bandwidth, int | float) and 0 < self.bandwidth < math.inf):
            raise RequestError(f"task 'kernel': bandwidth must be a number > 0 or 'auto', got {self.bandwidth!r}.")
        if self.method == "fourier" and self.kernel not in FOURIER:
            raise RequestError(
                f"task 'kernel': Fourier features are for {' and '.join(FOURIER)}, got kernel = {self.kernel!r}; "
                "use method = 'nystrom'."
            )
        if self.fourier and self.width % 2:
            raise RequestError(f"task 'kernel': Fourier features come in pairs; width must be even, got {self.width}.")

    @property
    def fourier(self) -> bool:
        return self.kernel in FOURIER if self.method == "auto" else self.method == "fourier"

    @property
    def scale(self) -> float:
        """The bandwidth as a number."""
        if self.bandwidth != "auto":
            return float(self.bandwidth)
        return float(self.inputs) if self.kernel == "laplace" else math.sqrt(self.inputs)

    @property
    def exact(self) -> kernel_functions.Kernel:
        """The kernel that phi(x)'phi(z) approximates."""
        return kernel_functions.find(self.kernel, bandwidth=self.scale, degree=self.degree)

    def __call__(self, x: Tensor) -> Tensor:
        """phi of x [..., inputs]: [..., width]."""
        if self.fourier:
            angle = x @ draw_frequencies(self).to(x.dtype)
            return torch.cat([angle.cos(), angle.sin()], -1) * math.sqrt(2 / self.width)
        z, root = (part.to(x.dtype) for part in draw_landmarks(self))
        return self.exact(x, z) @ root


@lru_cache(maxsize=32)
def draw_frequencies(features: KernelFeatures) -> Tensor:
    """[inputs, width/2]: omega."""
    rng = generator(features.seed, "model")
    shape = (features.inputs, features.width // 2)
    draws = rng.standard_normal(shape) if features.kernel == "rbf" else rng.standard_cauchy(shape)
    return torch.from_numpy(draws / features.scale)


@lru_cache(maxsize=32)
def draw_landmarks(features: KernelFeatures) -> tuple[Tensor, Tensor]:
    """Z [width, inputs] and k(Z, Z)^(-1/2) [width, width]; directions of no length are left out."""
    rng = generator(features.seed, "model")
    shape = (features.width, features.inputs)
    box = features.landmarks == "box"
    z = torch.from_numpy(rng.uniform(-math.sqrt(3), math.sqrt(3), shape) if box else rng.standard_normal(shape))
    values, vectors = torch.linalg.eigh(features.exact(z, z))
    inverse = torch.where(values > RANK * values[-1], values.clamp(min=1e-300).rsqrt(), torch.zeros_like(values))
    return z, (vectors * inverse) @ vectors.mT


@dataclass(frozen=True)
class KernelRegression(Linear):
    """Linear regression on phi(x), x of `features` columns; the intercept, if any, is the last coefficient."""

    ridge: float = 1e-3
    kernel: str | kernel_functions.Kernel = "rbf"
    width: int = 200
    bandwidth: float | str = "auto"
    degree: int = 2
    method: str = "auto"
    landmarks: str = "gaussian"
    seed: int = 0

    name: ClassVar[str] = "kernel"

    def __post_init__(self) -> None:
        self.lift  # noqa: B018  # checks the settings

    @property
    def lift(self) -> KernelFeatures:
        return KernelFeatures(
            self.features, self.kernel, self.width, self.bandwidth, self.degree, self.method, self.landmarks, self.seed
        )

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.width + self.intercept

    def design(self, x: Tensor) -> Tensor:
        """phi(x), with a column of ones if there is an intercept."""
        return super().design(self.lift(x))

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """A few clients at a time: phi(x) is longer than x."""
        few = self._few(x)
        return torch.cat([torch.bmm(self.design(a), v[..., None])[..., 0] for a, v in zip(x.split(few), w.split(few))])

    def condense(self, batch: Batch) -> Quadratic:
        few = self._few(batch.x)
        parts = [super(KernelRegression, self).condense(Batch(*p)) for p in zip(*(b.split(few) for b in batch[:3]))]
        return Quadratic(*(torch.cat(column) for column in zip(*parts)))

    def grad(self, w: Tensor, batch: Batch | Quadratic) -> Tensor:
        if isinstance(batch, Quadratic):
            return super().grad(w, batch)
        design = self.design(batch.x)
        residual = batch.weight * (torch.bmm(design, w[..., None])[..., 0] - batch.y)
        return torch.bmm(residual[:, None], design)[:, 0] + self.ridge * w

    def step_in_place(self) -> None:
        """None: a linear model's steps are on x, not on phi(x)."""

    def describe(self) -> JsonObject:
        """The settings that the parameters belong to, written to the model file."""
        kernel = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", "function")
        names = ("width", "bandwidth", "degree", "method", "landmarks", "seed", "intercept")
        return {"kernel": kernel} | {name: getattr(self, name) for name in names}

    def _few(self, x: Tensor) -> int:
        """How many clients' features one block of memory holds."""
        return max(1, MAX_PADDED_BYTES // max(x.shape[1] * self.dim * x.element_size(), 1))
