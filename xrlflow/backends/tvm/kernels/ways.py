"""All ways in which our kernels compute a convolution, or a product with constant weights.

A way is an algorithm with the blocking of its kernel. `GENERATORS` says which layers an algorithm can compute, which
blockings there are, which one has the least estimated time, and how the kernel is written. What a tuner may choose is
what is said here.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm import schedules
from xrlflow.backends.tvm.kernels import direct, products, winograd
from xrlflow.backends.tvm.kernels.algorithms import Algorithm
from xrlflow.backends.tvm.toolchain.target import Machine

Form: TypeAlias = direct.Form | products.Form
Plan: TypeAlias = schedules.Choice | direct.Plan | products.Plan | winograd.Plan
Floats: TypeAlias = npt.NDArray[np.float32]

# Fewer channels, on either side, leave little to multiply.
_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm, and the blocking of its kernel (of TILES, None: that of the heuristic)."""

    algorithm: Algorithm
    plan: Plan | None = None

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
                plan = GENERATORS[algorithm].read(blocking)
            elif blocking is None:
                return Way(algorithm)
            else:
                plan = schedules.Choice(schedules.Tile(**blocking.pop("tile")), **blocking)
            return Way(algorithm, plan) if is_typed(plan) else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        if self.plan is None:
            return self.algorithm.value
        if isinstance(self.plan, schedules.Choice):
            tile, first = self.plan.tile, "columns" if self.plan.columns_first else "rows"
            return f"{self.algorithm.value}, {tile.rows}x{tile.columns} of {tile.lanes}, {first} first"
        return f"{self.algorithm.value}, {GENERATORS[self.algorithm].told(self.plan)}"


def is_typed(blocking: Any) -> bool:
    """Whether the fields of a blocking that was stored are of their declared types. 2.0 and true equal the numbers of a
    blocking, but are no sizes of loops."""
    values = [(field.type, getattr(blocking, field.name)) for field in fields(blocking)]
    return all(
        type(value).__name__ == kind and (not is_dataclass(value) or is_typed(value))
        for kind, value in values
    )


def is_pointwise(form: direct.Form) -> bool:
    """Whether a convolution is a product of its pixels with weights."""
    return (
        math.prod(form.window) == math.prod(form.strides) == form.groups == 1
        and not any(form.begin)
        and form.image[:-1] == form.out[:-1]
    )


def multiplies_less(form: direct.Form) -> bool:
    """Whether there are algorithms with fewer multiplications for a convolution: 3x3, not strided or dilated."""
    plain = form.window == (1, 3, 3) and math.prod(form.strides) == math.prod(form.dilations) == 1
    return len(form.image) == 4 and plain and min(form.channels, form.columns) >= _CHANNELS


def product_of(form: Form) -> products.Form:
    """A product, or a pointwise convolution as one."""
    return form if isinstance(form, products.Form) else products.Form(form.image, form.out, form.steps)


def winograd_of(form: Form, m: int) -> winograd.Form:
    """A convolution of `multiplies_less`, in tiles of m x m results."""
    form = _convolution(form)
    return winograd.Form(form.image, form.out, form.begin[1], form.begin[2], m, form.steps, form.groups)


def _convolution(form: Form) -> direct.Form:
    assert isinstance(form, direct.Form)
    return form


def _numbers(how: products.Plan | winograd.Plan) -> dict[str, int]:
    vectors = how.columns // how.lanes
    return {
        "rows": how.rows, "vectors": vectors, "lanes": how.lanes, "parts": how.parts, "ahead": int(how.ahead)
    }  # fmt: skip


def _blocked(how: products.Plan | winograd.Plan) -> str:
    ahead = ", fetched ahead" if how.ahead else ""
    parts = f" in {how.parts} parts" if how.parts > 1 else ""
    return f"{how.rows}x{how.columns} by {how.block}{parts}{ahead}"


def title(form: Form) -> str:
    """The kind and sizes of a layer."""
    if isinstance(form, products.Form):
        return f"product of {form.rows} rows, {form.terms} to {form.columns} columns"
    window = "x".join(map(str, form.window[5 - len(form.image) :]))
    at = "x".join(map(str, form.out[1:-1]))
    groups = f" in {form.groups} groups" if form.groups > 1 else ""
    strided = f" with stride {max(form.strides)}" if max(form.strides) > 1 else ""
    return f"{window} convolution of {form.image[-1]} to {form.out[-1]} channels{groups} at {at}{strided}"


class Generator(ABC):
    """Writes the kernels of one algorithm. `name`: of their functions."""

    name: ClassVar[str]

    @abstractmethod
    def fits(self, form: Form) -> bool:
        """Whether the algorithm can compute a layer."""

    @abstractmethod
    def plans(self, form: Form, machine: Machine) -> Iterator[Any]:
        """The blockings of a layer that it can compute."""

    @abstractmethod
    def usual(self, form: Form, machine: Machine) -> Any:
        """The blocking with the least estimated time."""

    @abstractmethod
    def cost(self, form: Form, plan: Any, machine: Machine) -> float:
        """The estimated time until the busiest core is done, in multiply-adds of vectors at a core's peak."""

    @abstractmethod
    def kernel(self, form: Form, plan: Any) -> Any:
        """The PrimFunc with parameters image, weights (`packed`), the extras of the steps, and result."""

    @abstractmethod
    def packed(self, weights: Floats, form: Form, plan: Any) -> Floats:
        """Floats in the order in which the kernel reads them."""

    @abstractmethod
    def read(self, blocking: dict[str, Any]) -> Any:
        """The blocking of a record. Raises TypeError if the record's is another one."""

    @abstractmethod
    def numbers(self, form: Form, plan: Any) -> dict[str, int]:
        """A blocking as numbers: rows and vectors of a tile, the lanes of a vector, in how many blocks a core takes its
        rows, among how many parts columns are divided, whether weights are fetched `ahead`, and an `order`."""

    @abstractmethod
    def told(self, plan: Any) -> str:
        """A blocking in words."""


class _Direct(Generator):
    """See `direct`."""

    name = "direct"

    def fits(self, form: Form) -> bool:
        return isinstance(form, direct.Form)

    def plans(self, form: Form, machine: Machine) -> Iterator[direct.Plan]:
        return direct.plans(_convolution(form), machine)

    def usual(self, form: Form, machine: Machine) -> direct.Plan:
        return direct.plan(_convolution(form), machine)

    def cost(self, form: Form, plan: direct.Plan, machine: Machine) -> float:
        return direct.cost(_convolution(form), plan, machine)

    def kernel(self, form: Form, plan: direct.Plan) -> Any:
        return direct.kernel(_convolution(form), plan)

    def packed(self, weights: Floats, form: Form, plan: direct.Plan) -> Floats:
        return direct.packed(weights, _convolution(form), plan)

    def read(self, blocking: dict[str, Any]) -> direct.Plan:
        return direct.Plan(**blocking)

    def numbers(self, form: Form, plan: direct.Plan) -> dict[str, int]:
        form = _convolution(form)
        return {
            "rows": plan.pixels, "vectors": plan.vectors, "lanes": plan.lanes, "blocks": plan.bands(form),
            "parts": plan.spans(form), "order": int(plan.shared),
        }  # fmt: skip

    def told(self, plan: direct.Plan) -> str:
        tile = f"{plan.pixels}x{plan.vectors * plan.lanes}"
        return f"{tile} in bands of {plan.band} rows and {plan.span} columns"


class _Product(Generator):
    """See `products`."""

    name = "product"

    def fits(self, form: Form) -> bool:
        return isinstance(form, products.Form) or is_pointwise(form)

    def plans(self, form: Form, machine: Machine) -> Iterator[products.Plan]:
        form = product_of(form)
        ahead = products.plan(form, machine).ahead
        for how in products.plans(form, machine):
            yield replace(how, ahead=ahead)
            yield replace(how, ahead=not ahead)

    def usual(self, form: Form, machine: Machine) -> products.Plan:
        return products.plan(product_of(form), machine)

    def cost(self, form: Form, plan: products.Plan, machine: Machine) -> float:
        form = product_of(form)
        return form.terms * products.cost(form, plan, machine)

    def kernel(self, form: Form, plan: products.Plan) -> Any:
        return products.kernel(product_of(form), plan)

    def packed(self, weights: Floats, form: Form, plan: products.Plan) -> Floats:
        return products.packed(weights.reshape(-1, weights.shape[-1]), plan)

    def read(self, blocking: dict[str, Any]) -> products.Plan:
        return products.Plan(**blocking)

    def numbers(self, form: Form, plan: products.Plan) -> dict[str, int]:
        return _numbers(plan) | {"blocks": -(-product_of(form).rows // plan.block)}

    def told(self, plan: products.Plan) -> str:
        return _blocked(plan)


class _Winograd(Generator):
    """See `winograd`. `m`: the results of a tile along one side."""

    name = "winograd"

    def __init__(self, m: int) -> None:
        self._m = m

    def fits(self, form: Form) -> bool:
        return isinstance(form, direct.Form) and multiplies_less(form)

    def of(self, form: Form) -> winograd.Form:
        return winograd_of(form, self._m)

    def plans(self, form: Form, machine: Machine) -> Iterator[winograd.Plan]:
        ahead = self.usual(form, machine).ahead
        for how in winograd.plans(self.of(form), machine):
            yield replace(how, ahead=ahead)
            yield replace(how, ahead=not ahead)

    def usual(self, form: Form, machine: Machine) -> winograd.Plan:
        return winograd.plan(self.of(form), machine)

    def cost(self, form: Form, plan: winograd.Plan, machine: Machine) -> float:
        return winograd.cost(self.of(form), plan, machine)

    def kernel(self, form: Form, plan: winograd.Plan) -> Any:
        return winograd.kernel(self.of(form), plan)

    def packed(self, weights: Floats, form: Form, plan: winograd.Plan) -> Floats:
        return winograd.packed(weights, self.of(form), plan)

    def read(self, blocking: dict[str, Any]) -> winograd.Plan:
        return winograd.Plan(**blocking)

    def numbers(self, form: Form, plan: winograd.Plan) -> dict[str, int]:
        return _numbers(plan) | {"blocks": plan.block // plan.rows}

    def told(self, plan: winograd.Plan) -> str:
        return _blocked(plan)


GENERATORS: Mapping[Algorithm, Generator] = MappingProxyType(
    {
        Algorithm.DIRECT: _Direct(),
        Algorithm.PRODUCT: _Product(),
        Algorithm.F23: _Winograd(2),
        Algorithm.F43: _Winograd(4),
    }
)
"""Those whose kernels are written as a whole; TILES are schedules of TVM's (see `tiles`)."""


def tiles_cost(form: Form, machine: Machine) -> float:
    """The estimated time of TILES (see `Generator.cost`)."""
    if isinstance(form, products.Form):
        pixels, terms, vectors = form.rows, form.terms, -(-form.columns // machine.lanes)
    else:
        pixels, terms = math.prod(form.out[:-1]), form.terms
        # Without sums over channels, vectors have neighbouring channels of several groups.
        grouped = form.groups if form.channels > 1 else 1
        vectors = -(-form.out[-1] // grouped // machine.lanes) * grouped
    weights = terms * vectors
    far = winograd.distance(4 * weights * machine.lanes, machine)
    return (1.2 * pixels + far) * weights / machine.cores


def algorithms_of(form: Form) -> list[Algorithm]:
    """The algorithms that can compute a layer."""
    return [Algorithm.TILES, *(a for a, generator in GENERATORS.items() if generator.fits(form))]
