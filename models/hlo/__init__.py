"""Programs for benchmarks of the order of XLA passes: training steps and inference of networks, written in jax.

    from models import hlo
    hlo.text("gpt2-2-training")         # the HLO text that jax hands to XLA, before any pass
    hlo.stablehlo("gpt2-2-training")    # the same as StableHLO
    hlo.inputs("gpt2-2-training")       # random arrays for its parameters

A training step computes the loss, its gradient and Adam's update of all parameters. The code is written as people write
it: Python loops over the layers, and no operations merged by hand. Tensors are small, because the result of a pass
depends on operations and hardly on dimensions. Lowering needs no weights. Importing this does not import jax; lowering
needs it (`pip install 'xrlflow[xla]'`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models import ZooError

if TYPE_CHECKING:
    from models.hlo.training import Program

__all__ = [
    "BENCHMARKS",
    "HELD_OUT",
    "Benchmark",
    "Family",
    "HloError",
    "Kind",
    "Variant",
    "find",
    "inputs",
    "operations",
    "stablehlo",
    "text",
]


class HloError(RuntimeError):
    """A benchmark cannot be lowered here. The message says what to install."""


class Family(str, Enum):
    """The architecture of a network."""

    GPT2 = "gpt2"
    BERT = "bert"
    RESNET = "resnet"
    MLP = "mlp"
    VIT = "vit"
    LSTM = "lstm"
    UNET = "unet"


HELD_OUT = frozenset({Family.VIT, Family.LSTM, Family.UNET})
"""Families that no agent is trained on: an agent is tested on architectures that it has not seen."""


class Kind(str, Enum):
    """The kind of program: a step of training, or inference, which computes the outputs alone."""

    TRAINING = "training"
    INFERENCE = "inference"


class Variant(str, Enum):
    """How a network differs from the standard one of its family."""

    USUAL = ""
    DROPOUT = "dropout"
    """GPT-2 and BERT: activations are dropped in training, by random bits of jax's threefry."""
    DECODE = "decode"
    """GPT-2: one token more, with a cache of keys and values."""
    BOTTLENECK = "bottleneck"
    """ResNet: blocks of three convolutions, as in ResNet-50, instead of two."""


_POSSIBLE: Mapping[Variant, frozenset[tuple[Family, Kind]]] = MappingProxyType(
    {
        Variant.USUAL: frozenset(product(Family, Kind)),
        Variant.DROPOUT: frozenset({(Family.GPT2, Kind.TRAINING), (Family.BERT, Kind.TRAINING)}),
        Variant.DECODE: frozenset({(Family.GPT2, Kind.INFERENCE)}),
        Variant.BOTTLENECK: frozenset(product([Family.RESNET], Kind)),
    }
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One program, which is lowered when its text is requested. Raises ZooError for an impossible combination."""

    family: Family
    layers: int
    """Transformer layers, residual blocks, LSTM layers or linear layers."""
    kind: Kind
    width: int = 64
    """Features, or the channels of the first block."""
    variant: Variant = Variant.USUAL

    def __post_init__(self) -> None:
        if (self.family, self.kind) not in _POSSIBLE[self.variant]:
            raise ZooError(
                f"{self.name}: there is no variant {self.variant.value} of {self.family.value} {self.kind.value}"
            )
        if self.layers < 1:
            raise ZooError(f"{self.name}: the number of layers is at least 1, not {self.layers}")
        if self.family is Family.UNET and self.layers % 2 == 0:
            raise ZooError(
                f"{self.name}: a UNet has as many blocks down as up and one between: an odd number"
            )

    @property
    def name(self) -> str:
        """The name, such as gpt2-2-training or gpt2-dropout-2-training."""
        parts = (self.family.value, self.variant.value, str(self.layers), self.kind.value)
        return "-".join(part for part in parts if part)

    @property
    def held_out(self) -> bool:
        return self.family in HELD_OUT

    def text(self) -> str:
        """The module as HLO text, before any pass. The text depends only on the version of jax."""
        return _lowered(self, "hlo")

    def stablehlo(self) -> str:
        """The module as StableHLO in MLIR's text form."""
        return _lowered(self, "stablehlo")

    def inputs(self, seed: int = 0) -> tuple[NDArray[np.generic], ...]:
        """Random arrays for the parameters of the entry computation, in their order.

        Values are in the range that the program expects: token ids are in the vocabulary, variances are positive.
        """
        program = self.program(np.random.default_rng(seed))
        import jax

        return tuple(jax.tree.leaves(program.arguments))

    def program(self, rng: np.random.Generator | None = None) -> Program:
        """The function and its arguments: random arrays, or, without `rng`, only shapes and types."""
        try:
            import jax  # noqa: F401
        except ImportError as error:
            raise HloError(
                f"{self.name} is lowered by jax, which cannot be imported ({error}): "
                "install it with `pip install 'xrlflow[xla]'`"
            ) from None
        from models.hlo.networks import program

        return program(self, rng)


@cache
def _lowered(benchmark: Benchmark, dialect: str) -> str:
    """The text of a benchmark as "hlo" or "stablehlo", lowered for the CPU even if jax finds other devices."""
    program = benchmark.program()
    import jax

    with jax.enable_x64(False):
        traced = jax.jit(program.function).trace(*program.arguments)
        return str(traced.lower(lowering_platforms=("cpu",)).as_text(dialect))


def _benchmarks() -> tuple[Benchmark, ...]:
    training, inference = Kind.TRAINING, Kind.INFERENCE
    return (
        Benchmark(Family.GPT2, 2, training),
        Benchmark(Family.GPT2, 4, training),
        Benchmark(Family.GPT2, 6, training, width=32),
        Benchmark(Family.GPT2, 2, training, variant=Variant.DROPOUT),
        Benchmark(Family.GPT2, 4, inference, width=128),
        Benchmark(Family.GPT2, 12, inference),
        Benchmark(Family.GPT2, 4, inference, variant=Variant.DECODE),
        Benchmark(Family.BERT, 2, training),
        Benchmark(Family.BERT, 4, training, width=32),
        Benchmark(Family.BERT, 2, training, variant=Variant.DROPOUT),
        Benchmark(Family.BERT, 3, inference, width=128),
        Benchmark(Family.BERT, 12, inference),
        Benchmark(Family.RESNET, 2, training, width=32),
        Benchmark(Family.RESNET, 4, training, width=16),
        Benchmark(Family.RESNET, 8, training, width=8),
        Benchmark(Family.RESNET, 8, inference, width=16),
        Benchmark(Family.RESNET, 4, inference, width=16, variant=Variant.BOTTLENECK),
        Benchmark(Family.MLP, 3, training, width=128),
        Benchmark(Family.MLP, 8, training),
        Benchmark(Family.MLP, 6, inference),
        Benchmark(Family.VIT, 2, training),
        Benchmark(Family.VIT, 4, training, width=32),
        Benchmark(Family.VIT, 6, inference),
        Benchmark(Family.VIT, 12, inference),
        Benchmark(Family.LSTM, 2, training),
        Benchmark(Family.LSTM, 3, training, width=32),
        Benchmark(Family.LSTM, 4, inference),
        Benchmark(Family.UNET, 3, training, width=32),
        Benchmark(Family.UNET, 5, training, width=32),
        Benchmark(Family.UNET, 5, inference, width=32),
    )


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({each.name: each for each in _benchmarks()})


def find(name: str) -> Benchmark:
    """The benchmark called `name`. If there is none, raises ZooError with the names of all benchmarks."""
    try:
        return BENCHMARKS[name]
    except KeyError:
        raise ZooError(f"no program is called {name!r}; there are: {', '.join(BENCHMARKS)}") from None


def text(name: str) -> str:
    """The HLO text of a benchmark, before any pass."""
    return find(name).text()


def stablehlo(name: str) -> str:
    """The StableHLO text of a benchmark."""
    return find(name).stablehlo()


def inputs(name: str, seed: int = 0) -> tuple[NDArray[np.generic], ...]:
    """Random arrays for the parameters of a benchmark's entry computation."""
    return find(name).inputs(seed)


_INSTRUCTION = re.compile(r"^ +(?:ROOT )?\S+ = ", re.MULTILINE)


def operations(hlo: str) -> int:
    """The number of instructions in all computations of an HLO text, parameters and constants included."""
    return len(_INSTRUCTION.findall(hlo))
