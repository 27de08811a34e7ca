"""Element-wise operators that a kernel applies to its results before it stores them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from xrlflow.backends.tvm.kernels.building import FLOAT, lanes_of, number, ramp, spread


@dataclass(frozen=True, slots=True)
class Extra:
    """A further operand of a step: one number for each output channel, or one number for each result."""

    by_channel: bool


@dataclass(frozen=True, slots=True)
class Earlier:
    """An operand that was computed before: by the convolution or product (0), or by the step with this number (from 1
    on)."""

    step: int


Operand: TypeAlias = "float | Extra | Earlier"


@dataclass(frozen=True, slots=True)
class Step:
    """An operator after the convolution or product. The last step computes the result."""

    operator: str
    operands: tuple[Operand, ...]


def _of(name: str) -> Callable[..., Any]:
    """A function of TVM's module `tirx`, which is imported at the call."""

    def call(*operands: Any) -> Any:
        from tvm import tirx

        return getattr(tirx, name)(*operands)

    return call


def _sigmoid(x: Any) -> Any:
    from tvm import tirx

    one = spread(1.0, lanes_of(x))
    return one / (one + tirx.exp(spread(0.0, lanes_of(x)) - x))


def _relu(x: Any) -> Any:
    from tvm import tirx

    return tirx.Max(spread(0.0, lanes_of(x)), x)  # Max returns NaN only if it is the second operand


def _gelu(x: Any) -> Any:
    from tvm import tirx

    half, root = spread(0.5, lanes_of(x)), spread(math.sqrt(0.5), lanes_of(x))
    return x * (half + half * tirx.erf(x * root))


STEPS: dict[str, Callable[..., Any]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.maximum": _of("Max"),
    "relax.minimum": _of("Min"),
    "relax.nn.relu": _relu,
    "relax.round": _of("nearbyint"),  # ties to even
    "relax.divide": lambda a, b: a / b,
    "relax.sigmoid": _sigmoid,
    "relax.tanh": _of("tanh"),
    "relax.erf": _of("erf"),
    "relax.nn.gelu": _gelu,
}
"""The operators that may follow the convolution or product, by Relax's name."""

CASTS = {f"relax.astype.{kind}": kind for kind in ("int8", "uint8")}
"""The operators that convert results to bytes, and the types of bytes. They may only be the last step."""


def kind_of(steps: Sequence[Step]) -> str:
    """The type of the results after the steps."""
    return CASTS.get(steps[-1].operator, FLOAT) if steps else FLOAT


def extras_of(steps: Iterable[Step]) -> list[Extra]:
    return [o for step in steps for o in step.operands if isinstance(o, Extra)]


def stepped(steps: Sequence[Step], extras: Sequence[Any], value: Any, index: Sequence[Any], done: Any) -> Any:
    """A vector of results after the steps.

    `extras`: the buffers of the steps' extra operands. `index`: the index of the vector in the result, its channels
    last. `done`: a local buffer [steps or more, lanes of a vector].
    """
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    lanes = lanes_of(index[-1])
    at = ramp(number(0), lanes)
    remaining = iter(extras)
    results = [T.bind(value)]
    for turn, step in enumerate(steps):
        operands: list[Any] = []
        for operand in step.operands:
            if isinstance(operand, Earlier):
                operands.append(results[operand.step])
            elif isinstance(operand, Extra):
                buffer = next(remaining)
                operands.append(buffer[index[-1]] if operand.by_channel else buffer[tuple(index)])
            else:
                operands.append(spread(operand, lanes))
        if step.operator in CASTS:
            return tirx.Cast(CASTS[step.operator] + (f"x{lanes}" if lanes > 1 else ""), operands[0])
        # TVM inlines variables. It must not inline calls of functions, for which it introduces variables of its own. So
        # the results of functions are written to a buffer.
        T.buffer_store(done, STEPS[step.operator](*operands), [turn, at])
        results.append(T.bind(done[turn, at]))
    return results[-1]
