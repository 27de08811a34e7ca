"""The kernels of convolutions and of products with constant weights, under one interface.

Each `Algorithm` but TILES has a `LayerKernel` in `KERNELS`: it says which layers it can compute, which blockings the
kernel may have, which of these has the least estimated time, and how the kernel is written. A `KernelChoice` is an
algorithm with a blocking. All choices for a layer are the design space of a tuner.
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

LayerWorkload: TypeAlias = direct.Convolution | products.Product
Blocking: TypeAlias = (
    ratings.TileBlocking | direct.DirectBlocking | products.ProductBlocking | winograd.WinogradBlocking
)
Floats: TypeAlias = npt.NDArray[np.float32]

# The least number of channels, on either side, for Winograd's algorithms. With fewer channels, there is little to
# multiply.
_CHANNELS = 16


class Algorithm(Enum):
    """How a convolution or product is computed: by TVM's loops in tiles (see `fusion.tiles`), or by a generated kernel
    (see `direct`, `products`). F(m, 3) computes tiles of m x m results (see `winograd`)."""

    TILES = "tiles"
    DIRECT = "direct"
    PRODUCT = "product"
    F23 = "F(2,3)"
    F43 = "F(4,3)"

    @property
    def m(self) -> int | None:
        return {Algorithm.F23: 2, Algorithm.F43: 4}.get(self)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An algorithm, and the blocking of its kernel. For TILES the blocking may be None, which means the heuristic's
    blocking."""

    algorithm: Algorithm
    blocking: Blocking | None = None

    @property
    def group(self) -> Algorithm:
        return self.algorithm

    @property
    def text(self) -> str:
        """The choice as JSON, as stores have it."""
        return json.dumps([self.algorithm.value, None if self.blocking is None else asdict(self.blocking)])

    @staticmethod
    def stored(text: str) -> KernelChoice | None:
        """The choice that a stored text describes; None if another version of the program wrote a text that this
        version cannot read."""
        try:
            name, values = json.loads(text)
            algorithm = Algorithm(name)
            if algorithm is not Algorithm.TILES:
                blocking = KERNELS[algorithm].blocking_type(**values)
            elif values is None:
                return KernelChoice(algorithm)
            else:
                blocking = ratings.TileBlocking(ratings.Tile(**values.pop("tile")), **values)
            return KernelChoice(algorithm, blocking) if is_typed(blocking) else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        return self.algorithm.value if self.blocking is None else f"{self.algorithm.value}, {self.blocking}"


def is_typed(blocking: Any) -> bool:
    """Whether the fields of a blocking from a store have their declared types. (2.0 and true are equal to the integers
    2 and 1, but cannot be extents of loops.)"""
    values = [(field.type, getattr(blocking, field.name)) for field in fields(blocking)]
    return all(
        type(value).__name__ == kind and (not is_dataclass(value) or is_typed(value))
        for kind, value in values
    )


def is_product(workload: LayerWorkload) -> bool:
    """Whether a layer is a product, or a pointwise convolution, which multiplies each pixel with the same matrix."""
    return isinstance(workload, products.Product) or (
        math.prod(workload.window) == math.prod(workload.strides) == workload.groups == 1
        and not any(workload.begin)
        and workload.image[:-1] == workload.out[:-1]
    )


def multiplies_less(workload: LayerWorkload) -> bool:
    """Whether an algorithm with fewer multiplications (Winograd's) can compute a layer: a 3x3 convolution without
    stride and dilation."""
    if isinstance(workload, products.Product):
        return False
    plain = workload.window == (1, 3, 3) and math.prod(workload.strides) == math.prod(workload.dilations) == 1
    return len(workload.image) == 4 and plain and min(workload.channels, workload.columns) >= _CHANNELS


def product_of(workload: LayerWorkload) -> products.Product:
    """A product, or a pointwise convolution, as the workload of a matrix product."""
    return (
        workload
        if isinstance(workload, products.Product)
        else products.Product(workload.image, workload.out, workload.steps)
    )


def winograd_of(workload: LayerWorkload, m: int) -> winograd.WinogradConvolution:
    """The workload of a convolution of `multiplies_less` in tiles of m x m results."""
    workload = _convolution(workload)
    return winograd.WinogradConvolution(
        workload.image, workload.out, workload.begin[1], workload.begin[2], m, workload.steps, workload.groups
    )


def _convolution(workload: LayerWorkload) -> direct.Convolution:
    assert isinstance(workload, direct.Convolution)
    return workload


def title(workload: LayerWorkload) -> str:
    """The kind and dimensions of a layer, as text."""
    if isinstance(workload, products.Product):
        return f"product of {workload.rows} rows, {workload.terms} to {workload.columns} columns"
    window = "x".join(map(str, workload.window[5 - len(workload.image) :]))
    at = "x".join(map(str, workload.out[1:-1]))
    groups = f" in {workload.groups} groups" if workload.groups > 1 else ""
    strided = f" with stride {max(workload.strides)}" if max(workload.strides) > 1 else ""
    return f"{window} convolution of {workload.image[-1]} to {workload.out[-1]} channels{groups} at {at}{strided}"


class KernelBlocking(Protocol):
    """The blocking of a generated kernel. `str()` describes it in words."""

    def numbers(self, workload: Any, /) -> dict[str, int]:
        """The knobs of the blocking (`tuning.space.KNOBS`): the rows and vectors of a tile; the lanes of a vector; the
        number of blocks into which a core divides its rows; the number of parts into which columns are divided; whether
        weights are fetched `ahead`; and `order`, whose meaning depends on the algorithm."""


WorkloadT = TypeVar("WorkloadT", contravariant=True)
BlockingT = TypeVar("BlockingT", bound=KernelBlocking)


class Kernel(Protocol[WorkloadT, BlockingT]):
    """A module that writes the kernels of an algorithm: `direct`, `products`, `winograd`."""

    def blockings(self, workload: WorkloadT, machine: Machine, /) -> Iterator[BlockingT]:
        """The blockings to choose from."""

    def best_blocking(self, workload: WorkloadT, machine: Machine, /) -> BlockingT:
        """The blocking with the least estimated time."""

    def cost(self, workload: WorkloadT, blocking: BlockingT, machine: Machine, /) -> float:
        """The estimated time until the busiest core has finished, in multiply-adds of vectors at a core's peak."""

    def packed(self, weights: Floats, workload: WorkloadT, blocking: BlockingT, /) -> Floats:
        """Weights in the order in which the kernel reads them."""

    def kernel(self, workload: WorkloadT, blocking: BlockingT, /) -> Any:
        """The PrimFunc with parameters image, weights (`packed`), the extra operands of the steps, and result."""


@dataclass(frozen=True, slots=True)
class LayerKernel(Generic[WorkloadT, BlockingT]):
    """The generated kernel of an algorithm, for all layers that `fits` admits. `name`: the name of the kernel's
    functions. `convert` maps a layer to the workload of the kernel. For the methods see `Kernel`."""

    name: str
    kernel: Kernel[WorkloadT, BlockingT]
    blocking_type: type[BlockingT]
    fits: Callable[[LayerWorkload], bool]
    convert: Callable[[LayerWorkload], WorkloadT]

    def blockings(self, workload: LayerWorkload, machine: Machine) -> Iterator[BlockingT]:
        return self.kernel.blockings(self.convert(workload), machine)

    def best_blocking(self, workload: LayerWorkload, machine: Machine) -> BlockingT:
        return self.kernel.best_blocking(self.convert(workload), machine)

    def cost(self, workload: LayerWorkload, blocking: BlockingT, machine: Machine) -> float:
        return self.kernel.cost(self.convert(workload), blocking, machine)

    def packed(self, weights: Floats, workload: LayerWorkload, blocking: BlockingT) -> Floats:
        return self.kernel.packed(weights, self.convert(workload), blocking)

    def code(self, workload: LayerWorkload, blocking: BlockingT) -> Any:
        return self.kernel.kernel(self.convert(workload), blocking)

    def numbers(self, workload: LayerWorkload, blocking: BlockingT) -> dict[str, int]:
        return blocking.numbers(self.convert(workload))


KERNELS: Mapping[Algorithm, LayerKernel[Any, Any]] = MappingProxyType(
    {
        Algorithm.DIRECT: LayerKernel(
            "direct",
            direct,
            direct.DirectBlocking,
            lambda workload: isinstance(workload, direct.Convolution),
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
"""The generated kernels. The algorithm TILES has no entry: it schedules TVM's loops (see `fusion.tiles`)."""


def tiles_cost(workload: LayerWorkload, machine: Machine) -> float:
    """The estimated time of TILES (see `Kernel.cost`)."""
    if isinstance(workload, products.Product):
        pixels, terms, vectors = workload.rows, workload.terms, -(-workload.columns // machine.lanes)
    else:
        pixels, terms = math.prod(workload.out[:-1]), workload.terms
        # Depthwise, without sums over channels, a vector has neighbouring channels of several groups.
        grouped = workload.groups if workload.channels > 1 else 1
        vectors = -(-workload.out[-1] // grouped // machine.lanes) * grouped
    weights = terms * vectors
    far = winograd.distance(4 * weights * machine.lanes, machine)
    return (1.2 * pixels + far) * weights / machine.cores


def algorithms_of(workload: LayerWorkload) -> list[Algorithm]:
    """The algorithms that can compute a layer."""
    return [Algorithm.TILES, *(a for a, kernel in KERNELS.items() if kernel.fits(workload))]
