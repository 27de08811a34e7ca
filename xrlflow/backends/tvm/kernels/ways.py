"""All ways in which our kernels compute a convolution, or a product with constant weights.

A way is an algorithm with the blocking of its kernel. `KERNELS` says which layers an algorithm can compute, which
blockings there are, which one has the least estimated time, and how the kernel is written. What a tuner may choose is
what is said here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels import direct, products, winograd
from xrlflow.backends.tvm.schedules import ratings
from xrlflow.backends.tvm.toolchain.target import Machine

LayerForm: TypeAlias = direct.Convolution | products.Product
Blocking: TypeAlias = (
    ratings.TileBlocking | direct.DirectBlocking | products.ProductBlocking | winograd.WinogradBlocking
)
Floats: TypeAlias = npt.NDArray[np.float32]

# Fewer channels, on either side, leave little to multiply.
_CHANNELS = 16


class Algorithm(Enum):
    """How a convolution or product is computed: by TVM's loops in tiles (see `tiles`), or as one kernel of ours (see
    `direct`, `products`). F(m, 3): tiles of m x m results (see `winograd`)."""

    TILES = "tiles"
    DIRECT = "direct"
    PRODUCT = "product"
    F23 = "F(2,3)"
    F43 = "F(4,3)"

    @property
    def m(self) -> int | None:
        return {Algorithm.F23: 2, Algorithm.F43: 4}.get(self)


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm, and the blocking of its kernel (of TILES, None: that of the heuristic)."""

    algorithm: Algorithm
    plan: Blocking | None = None

    @property
    def group(self) -> Algorithm:
        return self.algorithm

    @property
    def text(self) -> str:
        """As it is stored: JSON."""
        return json.dumps([self.algorithm.value, None if self.plan is None else asdict(self.plan)])

    @staticmethod
    def stored(text: str) -> Way | None:
        """The way of a record; None if another version of the program wrote something else."""
        try:
            name, blocking = json.loads(text)
            algorithm = Algorithm(name)
            if algorithm is not Algorithm.TILES:
                plan = KERNELS[algorithm].blocking(**blocking)
            elif blocking is None:
                return Way(algorithm)
            else:
                plan = ratings.TileBlocking(ratings.Tile(**blocking.pop("tile")), **blocking)
            return Way(algorithm, plan) if is_typed(plan) else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        return self.algorithm.value if self.plan is None else f"{self.algorithm.value}, {self.plan}"


def is_typed(blocking: Any) -> bool:
    """Whether the fields of a blocking that was stored are of their declared types. 2.0 and true equal the numbers of a
    blocking, but are no sizes of loops."""
    values = [(field.type, getattr(blocking, field.name)) for field in fields(blocking)]
    return all(
        type(value).__name__ == kind and (not is_dataclass(value) or is_typed(value))
        for kind, value in values
    )


def is_product(form: LayerForm) -> bool:
    """Whether a layer is a product, or a convolution that is one of its pixels with weights."""
    return isinstance(form, products.Product) or (
        math.prod(form.window) == math.prod(form.strides) == form.groups == 1
        and not any(form.begin)
        and form.image[:-1] == form.out[:-1]
    )


def multiplies_less(form: LayerForm) -> bool:
    """Whether there are algorithms with fewer multiplications for a layer: 3x3 convolutions, not strided or dilated."""
    if isinstance(form, products.Product):
        return False
    plain = form.window == (1, 3, 3) and math.prod(form.strides) == math.prod(form.dilations) == 1
    return len(form.image) == 4 and plain and min(form.channels, form.columns) >= _CHANNELS


def product_of(form: LayerForm) -> products.Product:
    """A product, or a pointwise convolution as one."""
    return form if isinstance(form, products.Product) else products.Product(form.image, form.out, form.steps)


def winograd_of(form: LayerForm, m: int) -> winograd.WinogradConvolution:
    """A convolution of `multiplies_less`, in tiles of m x m results."""
    form = _convolution(form)
    return winograd.WinogradConvolution(
        form.image, form.out, form.begin[1], form.begin[2], m, form.steps, form.groups
    )


def _convolution(form: LayerForm) -> direct.Convolution:
    assert isinstance(form, direct.Convolution)
    return form


def title(form: LayerForm) -> str:
    """The kind and sizes of a layer."""
    if isinstance(form, products.Product):
        return f"product of {form.rows} rows, {form.terms} to {form.columns} columns"
    window = "x".join(map(str, form.window[5 - len(form.image) :]))
    at = "x".join(map(str, form.out[1:-1]))
    groups = f" in {form.groups} groups" if form.groups > 1 else ""
    strided = f" with stride {max(form.strides)}" if max(form.strides) > 1 else ""
    return f"{window} convolution of {form.image[-1]} to {form.out[-1]} channels{groups} at {at}{strided}"


class KernelBlocking(Protocol):
    """A blocking of a kernel that is written as a whole. Its text says it in words."""

    def numbers(self, form: Any, /) -> dict[str, int]:
        """It as numbers: rows and vectors of a tile, the lanes of a vector, in how many blocks a core takes its rows,
        among how many parts columns are divided, whether weights are fetched `ahead`, and an `order`."""


FormT = TypeVar("FormT", contravariant=True)
BlockingT = TypeVar("BlockingT", bound=KernelBlocking)


class Kernel(Protocol[FormT, BlockingT]):
    """A module that writes the kernels of an algorithm: `direct`, `products`, `winograd`."""

    def plans(self, form: FormT, machine: Machine, /) -> Iterator[BlockingT]:
        """The blockings to choose from."""

    def plan(self, form: FormT, machine: Machine, /) -> BlockingT:
        """The blocking with the least estimated time."""

    def cost(self, form: FormT, how: BlockingT, machine: Machine, /) -> float:
        """The estimated time until the busiest core is done, in multiply-adds of vectors at a core's peak."""

    def packed(self, weights: Floats, form: FormT, how: BlockingT, /) -> Floats:
        """Weights in the order in which the kernel reads them."""

    def kernel(self, form: FormT, how: BlockingT, /) -> Any:
        """The PrimFunc with parameters image, weights (`packed`), the extras of the steps, and result."""


@dataclass(frozen=True, slots=True)
class LayerKernel(Generic[FormT, BlockingT]):
    """A kernel for the layers that its algorithm `fits`. `name`: of its functions. `form` makes a layer what the kernel
    takes. For the methods see `Kernel`."""

    name: str
    kernel: Kernel[FormT, BlockingT]
    blocking: type[BlockingT]
    fits: Callable[[LayerForm], bool]
    form: Callable[[LayerForm], FormT]

    def plans(self, form: LayerForm, machine: Machine) -> Iterator[BlockingT]:
        return self.kernel.plans(self.form(form), machine)

    def usual(self, form: LayerForm, machine: Machine) -> BlockingT:
        return self.kernel.plan(self.form(form), machine)

    def cost(self, form: LayerForm, how: BlockingT, machine: Machine) -> float:
        return self.kernel.cost(self.form(form), how, machine)

    def packed(self, weights: Floats, form: LayerForm, how: BlockingT) -> Floats:
        return self.kernel.packed(weights, self.form(form), how)

    def code(self, form: LayerForm, how: BlockingT) -> Any:
        return self.kernel.kernel(self.form(form), how)

    def numbers(self, form: LayerForm, how: BlockingT) -> dict[str, int]:
        return how.numbers(self.form(form))


KERNELS: Mapping[Algorithm, LayerKernel[Any, Any]] = MappingProxyType(
    {
        Algorithm.DIRECT: LayerKernel(
            "direct",
            direct,
            direct.DirectBlocking,
            lambda form: isinstance(form, direct.Convolution),
            _convolution,
        ),
        Algorithm.PRODUCT: LayerKernel("product", products, products.ProductBlocking, is_product, product_of),
        **{
            algorithm: LayerKernel(
                "winograd", winograd, winograd.WinogradBlocking, multiplies_less, partial(winograd_of, m=m)
            )
            for algorithm, m in ((Algorithm.F23, 2), (Algorithm.F43, 4))
        },
    }
)
"""Those whose kernels are written as a whole; TILES are schedules of TVM's (see `fusion.tiles`)."""


def tiles_cost(form: LayerForm, machine: Machine) -> float:
    """The estimated time of TILES (see `Kernel.cost`)."""
    if isinstance(form, products.Product):
        pixels, terms, vectors = form.rows, form.terms, -(-form.columns // machine.lanes)
    else:
        pixels, terms = math.prod(form.out[:-1]), form.terms
        # Without sums over channels, vectors have neighbouring channels of several groups.
        grouped = form.groups if form.channels > 1 else 1
        vectors = -(-form.out[-1] // grouped // machine.lanes) * grouped
    weights = terms * vectors
    far = winograd.distance(4 * weights * machine.lanes, machine)
    return (1.2 * pixels + far) * weights / machine.cores


def algorithms_of(form: LayerForm) -> list[Algorithm]:
    """The algorithms that can compute a layer."""
    return [Algorithm.TILES, *(a for a, kernel in KERNELS.items() if kernel.fits(form))]
