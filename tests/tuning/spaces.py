"""Spaces of invented kernels, so that tests of tuners need not compile."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.tuning.measured import MACHINE
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning.space import DesignSpace

Kind = tuple[tuple[str, tuple[int, ...]], ...]
"""The knobs of an algorithm, by name, with their values."""
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


def upto(most: int) -> tuple[int, ...]:
    return tuple(range(1, most + 1))


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a kernel: the algorithm's number, and the value of each of its knobs."""

    numbers: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        return json.dumps(self.numbers)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A layer with one choice for each algorithm (`kinds`) and each combination of values of its knobs.

    There is no kernel if rows times vectors exceeds `most`. Without an `order`, kernels that differ only in `ahead` are
    equal.
    """

    name: str
    kinds: tuple[Kind, ...]
    size: int
    most: int = 1000
    weight: int = 1

    @property
    def work(self) -> int:
        return self.size**3

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size,) * 6 + (1,) * 7

    def everything(self, machine: Any) -> list[Choice]:
        result = []
        for number, kind in enumerate(self.kinds):
            names = [name for name, _ in kind]
            for values in itertools.product(*(values for _, values in kind)):
                result.append(Choice((("algorithm", number), *zip(names, values))))
        return result

    def numbers(self, choice: Choice) -> dict[str, int]:
        return dict(choice.numbers)

    def estimate(self, choice: Choice, machine: Any) -> float:
        return 1.0

    def kernel(self, choice: Choice, machine: Any) -> Any:
        numbers = self.numbers(choice)
        if numbers.get("rows", 1) * numbers.get("vectors", 1) > self.most:
            raise BackendError("there is no such kernel")
        if not numbers.get("order"):
            numbers.pop("ahead", None)
        return tvm().IRModule({}, attrs={"way": json.dumps([self.name, *numbers.items()])})


@cache
def space_of(layer: MadeUp) -> DesignSpace:
    as_layer: Any = layer
    return DesignSpace.of(as_layer, MACHINE)


PRODUCT = MadeUp(
    "product",
    (
        (("rows", upto(20)), ("vectors", upto(6)), ("blocks", POWERS), ("parts", (1, 2))),
        (("rows", upto(10)), ("vectors", upto(4)), ("order", (0, 1, 2))),
    ),
    size=64,
)
CONVOLUTION = MadeUp(
    "convolution",
    (
        (("rows", upto(12)), ("vectors", upto(4)), ("lanes", (8, 16)), ("ahead", (0, 1)), ("order", (0, 1))),
        (("rows", upto(14)), ("vectors", upto(4)), ("blocks", POWERS), ("other rows", upto(4))),
    ),
    size=28,
    most=40,
)
FOUR = MadeUp(
    "four algorithms",
    (
        (("rows", upto(12)), ("vectors", upto(4))),
        (("rows", upto(8)), ("vectors", upto(4)), ("parts", (1, 2))),
        (("vectors", upto(4)), ("blocks", POWERS), ("lanes", (4, 8, 16))),
        (("rows", upto(16)), ("order", (0, 1, 2))),
    ),
    size=100,
)
TINY = MadeUp(
    "tiny",
    (
        (("rows", upto(15)), ("vectors", upto(6)), ("blocks", POWERS[:5]), ("order", (0, 1, 2, 3))),
        (("rows", upto(15)), ("vectors", upto(6)), ("blocks", POWERS[:5]), ("parts", upto(4))),
    ),
    size=4,
)
SMALLEST = MadeUp(
    "smallest",
    (
        (("rows", upto(6)), ("vectors", upto(4)), ("ahead", (0, 1))),
        (("rows", upto(6)), ("blocks", POWERS[:4])),
    ),
    size=2,
    most=20,
)
ONE = MadeUp("one kernel", ((("rows", (1,)),),), size=1)
