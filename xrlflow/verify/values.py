"""Kinds of values for inputs (floats, integers, masks), and which of them are worth a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Spread(Enum):
    """How floats are drawn; `Floats.scale` says how large."""

    NORMAL = "normal"  # normally distributed around 0, with this deviation
    UNIFORM = "uniform"  # uniformly distributed from 0 to this
    FILLED = "filled"  # every element is this
    THRESHOLDS = "thresholds"  # around the numbers that the models compare values with
    TIES = "ties"  # multiples of one half up to 8, and zeros of both signs
    POISONED = "poisoned"  # normal, with some elements NaN or infinite
    NAN = "nan"  # every element is NaN


@dataclass(frozen=True, slots=True)
class Floats:
    """A kind of floats."""

    spread: Spread = Spread.NORMAL
    scale: float = 1.0

    @property
    def finite(self) -> bool:
        return self.spread not in (Spread.POISONED, Spread.NAN)


class Integers(Enum):
    """A kind of integers."""

    USUAL = "usual"
    ENDS = "ends"  # first and last indices of the tables, counted from both sides
    WIDE = "wide"  # beyond 32 bits, or above the signed maximum, where nothing bounds them
    BEYOND = "beyond"  # indices outside the tables


class Masks(Enum):
    """A kind of masks: the usual ones are all ones, prefixes or any pattern, depending on the sample."""

    USUAL = "usual"
    EMPTY = "empty"  # all zeros


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one run. `name`: for people; "" is the ordinary kind, of which there are several samples."""

    name: str = ""
    floats: Floats = Floats()
    integers: Integers = Integers.USUAL
    masks: Masks = Masks.USUAL

    @property
    def ordinary(self) -> bool:
        return not self.name


ORDINARY = Values()
TIES = Values("halves and zeros of both signs", Floats(Spread.TIES))

LARGE = 1e3
"""The largest magnitude that is tried, unless a model compares with larger numbers."""


@dataclass(frozen=True, slots=True)
class Takes:
    """The kinds of values that make a difference to a model's inputs.

    `floats`: some float is unconstrained. `bounded`: some integer indexes a table; `loose`: its reader checks the
    bounds. `free`: some integer is unconstrained. `masks`: some input is a mask. `thresholds`: numbers that the models
    compare values with. `ties`: a model rounds, truncates or divides, so that halves and signed zeros tell.
    """

    floats: bool
    bounded: bool
    loose: bool
    free: bool
    masks: bool
    thresholds: tuple[float, ...]
    ties: bool = False

    def kinds(self) -> Iterator[Values]:
        """The kinds to try besides ordinary values, the most telling first. Each has a run of its own."""
        largest = max(LARGE, *(2 * n for n in self.thresholds), LARGE)
        if self.floats:
            yield Values("values from 0 to 255", Floats(Spread.UNIFORM, 255.0))
            yield Values(f"values of {largest:g}", Floats(Spread.NORMAL, largest))
        if self.free:
            yield Values("integers of all magnitudes", integers=Integers.WIDE)
        if self.bounded:
            yield Values("indices at both ends of their tables", integers=Integers.ENDS)
        if self.masks:
            yield Values("masks of zeros", masks=Masks.EMPTY)
        if self.floats:
            if self.ties:
                yield TIES
            if self.thresholds:
                yield Values("values around the models' own bounds", Floats(Spread.THRESHOLDS))
            yield Values("some values NaN or infinite", Floats(Spread.POISONED))
            yield Values("NaN", Floats(Spread.NAN))
            yield Values("values from 0 to 1", Floats(Spread.UNIFORM, 1.0))
            yield Values("values of 0.001", Floats(Spread.NORMAL, 1e-3))
        if self.loose:
            yield Values("indices outside their tables", integers=Integers.BEYOND)
