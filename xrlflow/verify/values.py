"""Kinds of values for inputs (floats, integers, masks), and which kinds are worth a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Spread(Enum):
    """How floats are drawn. "Scale" below is `Floats.scale`."""

    NORMAL = "normal"  # normally distributed around 0; the scale is the standard deviation
    UNIFORM = "uniform"  # uniformly distributed from 0 to the scale
    FILLED = "filled"  # every element is the scale
    THRESHOLDS = "thresholds"  # around the numbers that the models compare values with
    TIES = "ties"  # multiples of one half up to 8, and zeros of both signs
    POISONED = "poisoned"  # normal, with some elements NaN or infinite
    NAN = "nan"  # every element is NaN


@dataclass(frozen=True, slots=True)
class Floats:
    """How the floats of one run are drawn: a distribution and its scale."""

    spread: Spread = Spread.NORMAL
    scale: float = 1.0

    @property
    def finite(self) -> bool:
        return self.spread not in (Spread.POISONED, Spread.NAN)


class Integers(Enum):
    """How the integers of one run are drawn."""

    USUAL = "usual"
    ENDS = "ends"  # first and last indices of the tables that they index, counted from both ends
    WIDE = "wide"  # beyond 32 bits, or above the signed maximum, for integers without a constraint
    BEYOND = "beyond"  # indices outside the tables that they index


class Masks(Enum):
    """How the masks of one run are drawn. The usual ones are all ones, prefixes or any pattern, depending on the
    sample."""

    USUAL = "usual"
    EMPTY = "empty"  # all zeros


@dataclass(frozen=True, slots=True)
class Values:
    """How all inputs of one run are drawn. `name`: the name in messages; "" for ordinary values, of which there are
    several samples.
    """

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
"""The largest magnitude that is drawn, unless a model compares with larger numbers."""


@dataclass(frozen=True, slots=True)
class InputTraits:
    """The properties of a model's inputs that decide which kinds of values are worth a run."""

    floats: bool  # some input of floats is unconstrained
    bounded: bool  # some integer indexes a table
    loose: bool  # an index outside its table only raises an error
    free: bool  # some integer is unconstrained
    masks: bool  # some input is a mask
    thresholds: tuple[float, ...]  # numbers that the models compare values with
    ties: bool = False  # a model rounds, truncates or divides: halves and the signs of zeros change results

    def kinds(self) -> Iterator[Values]:
        """The kinds to try besides ordinary values, those that reveal most mistakes first. Each gets a run of its
        own."""
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
