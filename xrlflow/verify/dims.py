"""Sizes for the dynamic dimensions of a model, in the order in which they are tried."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count, islice
from typing import TypeAlias

from xrlflow.common.sizes import Range, middle
from xrlflow.ir import FLOATS
from xrlflow.ops.work import BATCH_DIM, OTHER_DIM
from xrlflow.verify.signature import Port

Bindings: TypeAlias = Mapping[str, int]
"""Sizes by symbol. A dimension without a symbol is named by its input and axis: "input.0"."""


class Role(Enum):
    """The meaning of a dimension, guessed from its name and axis. It decides which sizes are tried first."""

    BATCH = "batch"
    PAST = "past"  # the positions that a decoder has cached
    TOTAL = "total"  # past and present positions together
    IMAGE = "image"  # the height or width of an image
    SAMPLES = "samples"  # the length of a waveform
    RANK = "rank"  # of an input of unknown rank
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Slot:
    """One dimension whose size is to be chosen. `axis`: the axis at which it first appears."""

    name: str
    axis: int
    role: Role
    nameless: bool


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dynamic dimensions of a model's inputs: those whose sizes are chosen, and those whose sizes are computed
    from the chosen ones.
    """

    slots: tuple[Slot, ...]
    sums: Mapping[str, ast.expr]
    ranges: Mapping[str, Range] = field(default_factory=dict)  # the user's

    @staticmethod
    def of(ports: Sequence[Port], ranges: Mapping[str, Range] | None = None) -> Dimensions:
        symbols = {d for p in ports for d in p.type.shape or () if isinstance(d, str)}
        sums = {s: tree for s in sorted(symbols) if (tree := _expression(s, symbols)) is not None}
        slots: dict[str, Slot] = {}
        for port in ports:
            if port.type.other is not None:
                continue
            if port.type.shape is None:
                name = f"{port.name}.rank"
                slots[name] = Slot(name, 0, Role.RANK, True)
                for axis in range(4):
                    name = f"{port.name}.{axis}"
                    slots[name] = Slot(name, axis, _role("", axis, 2), True)
                continue
            for axis, dim in enumerate(port.type.shape):
                if isinstance(dim, int) or dim in sums:
                    continue
                name = dim if dim is not None else f"{port.name}.{axis}"
                role = _of_signal(port, axis) or _role(dim or "", axis, len(port.type.shape))
                slots.setdefault(name, Slot(name, axis, role, dim is None))
        return Dimensions(tuple(slots.values()), sums, dict(ranges or {}))

    def complete(self, bindings: Mapping[str, int]) -> dict[str, int]:
        """The sizes `bindings`, together with those of the computed dimensions."""
        out = dict(bindings)
        for name, tree in self.sums.items():
            out.setdefault(name, _value(tree, out))
        return out

    def changed(self, base: Bindings, change: Mapping[str, int]) -> dict[str, int]:
        """The sizes `base` with those of `change` replaced, and the computed dimensions computed again."""
        bindings = {slot.name: change.get(slot.name, base[slot.name]) for slot in self.slots}
        past = sum(bindings[s.name] for s in self.slots if s.role == Role.PAST)
        present = next((bindings[s.name] for s in self.slots if s.role == Role.OTHER), 1)
        for slot in self.slots:
            if slot.role == Role.TOTAL and slot.name not in change and past:
                bindings[slot.name] = past + present
        return self.complete(bindings)

    def shape(self, port: Port, bindings: Bindings) -> tuple[int, ...]:
        """The input's shape in numbers. Raises KeyError for a dimension that is not bound."""
        dims = port.type.shape
        if dims is None:
            return tuple(bindings[f"{port.name}.{axis}"] for axis in range(bindings[f"{port.name}.rank"]))
        return tuple(
            d if isinstance(d, int) else bindings[d if d is not None else f"{port.name}.{axis}"]
            for axis, d in enumerate(dims)
        )

    def default(self, bound: Bindings) -> dict[str, int]:
        """The user's sizes, and the middles of the user's ranges; for other dimensions those that the cost model
        assumes.
        """
        bindings = {}
        for slot in self.slots:
            if slot.role == Role.RANK:
                # An input of unknown rank has the rank of the user's shape: of its sizes "input.0", "input.1" and so
                # on.
                stem = slot.name.removesuffix("rank")
                stated = {*bound, *self.ranges}
                usual = next(axis for axis in count() if f"{stem}{axis}" not in stated) or 2
            elif slot.name in self.ranges:
                usual = middle(*self.ranges[slot.name])
            else:
                usual = _USUAL_SIZE.get(slot.role, OTHER_DIM)
            bindings[slot.name] = bound.get(slot.name, usual)
        return self.complete(bindings)

    def ends(self, bound: Bindings) -> list[dict[str, int]]:
        """The sizes of `default` with the least, and with the greatest, sizes of the user's ranges."""
        usual = self.default(bound)
        free = {name: both for name, both in self.ranges.items() if name not in bound}
        return [
            self.changed(usual, {name: both[end] for name, both in free.items()}) for end in (0, 1) if free
        ]

    def scaled(self, base: Bindings, names: Sequence[str], factor: float) -> dict[str, int]:
        """These sizes times `factor`; heights and widths of images, which multiply, times its square root, in multiples
        of 32, since networks halve images up to five times.
        """
        images = {slot.name for slot in self.slots if slot.role is Role.IMAGE}
        return {
            n: max(32, int(factor**0.5 * base[n]) // 32 * 32)
            if n in images
            else max(1, int(factor * base[n]))
            for n in names
        }

    def ones(self, base: Bindings, bound: Bindings) -> list[dict[str, int]]:
        """The sizes `base` with one dimension at a time 1, of those that the user does not state: a decoder may take
        one token at a time.
        """
        names = [s.name for s in self.slots if s.role is Role.OTHER and s.name not in bound]
        return [self.changed(base, {n: 1}) for n in names if base[n] != 1 and n not in self.ranges]

    def candidates(self, bound: Bindings, turn: int = 0) -> Iterator[dict[str, int]]:
        """Different choices of sizes, never all 1, in the order in which they find most mistakes. The iterator is
        finite.

        The user's sizes come first. Next, each scheme of SCHEMES gives its first few choices, and after that each
        gives some more, in rounds. `turn` shifts the sizes within the schemes, so that another seed tries other sizes.
        """
        yielded: set[tuple[int, ...]] = set()
        names = [slot.name for slot in self.slots]
        schemes = [_mine(self, bound), *(scheme(self, bound, turn) for scheme in SCHEMES)]
        rounds = [islice(scheme, quota) for quota in (3, 3, 6) for scheme in schemes]
        for bindings in chain.from_iterable([*rounds, *(scheme(self, bound, turn) for scheme in FINITE)]):
            key = tuple(bindings[name] for name in names)
            free = [n for n, s in zip(key, self.slots) if s.role != Role.RANK]
            if key not in yielded and any(n != 1 for n in free):
                yielded.add(key)
                yield self.complete(bindings)


# With a cache of 64 tokens, what a decoder does with its cache would hardly count; 64 samples of a waveform are less
# than one of its frames.
_USUAL_SIZE = {Role.BATCH: BATCH_DIM, Role.PAST: 256, Role.IMAGE: 224, Role.SAMPLES: 16_000}
# Of images. With 1 channel it may be a mask of attention, with 4 a picture in a diffusion model's own form.
_CHANNELS = 3
_WAVEFORMS = ("audio", "wave", "sample", "signal", "input_values", "speech")

# If the name of the first dimension contains one of these, it is not a batch.
_NO_BATCH = ("seq", "len", "time", "token", "step", "frame", "audio", "row", "height", "width")


def _of_signal(port: Port, axis: int) -> Role | None:
    """The role of a dimension of an image or a waveform; None for others."""
    shape = port.type.shape or ()
    image = len(shape) == 4 and (
        (shape[1] == _CHANNELS and axis > 1) or (shape[3] == _CHANNELS and axis in (1, 2))
    )
    if image:
        return Role.IMAGE
    names = f"{port.name} {shape[axis]}".lower()
    if (
        len(shape) <= 3
        and axis == len(shape) - 1
        and port.type.dtype in FLOATS
        and any(w in names for w in _WAVEFORMS)
    ):
        return Role.SAMPLES
    return None


def _role(symbol: str, axis: int, rank: int) -> Role:
    name = symbol.lower()
    if "total" in name:
        return Role.TOTAL
    if "past" in name or "cache" in name:
        return Role.PAST
    if "batch" in name or name in ("n", "b", "bs"):
        return Role.BATCH
    if axis == 0 and rank > 1 and not any(word in name for word in _NO_BATCH):
        return Role.BATCH
    return Role.OTHER


def _expression(symbol: str, symbols: set[str]) -> ast.expr | None:
    """A symbol like "past_length + 1", as exporters write computed dimensions, or None for a plain one."""
    try:
        tree = ast.parse(symbol, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    allowed = (ast.BinOp, ast.Name, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Load)
    nodes = list(ast.walk(tree))
    if not isinstance(tree, ast.BinOp) or not all(isinstance(n, allowed) for n in nodes):
        return None
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    integers = all(isinstance(n.value, int) for n in nodes if isinstance(n, ast.Constant))
    return tree if names and names <= symbols and integers else None


def _value(tree: ast.expr, numbers: Mapping[str, int]) -> int:
    if isinstance(tree, ast.Name):
        return numbers[tree.id]
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, numbers), _value(tree.right, numbers)
        if isinstance(tree.op, ast.Add):
            return left + right
        if isinstance(tree.op, ast.Sub):
            return max(1, left - right)
        if isinstance(tree.op, ast.Mult):
            return left * right
        return max(1, left // max(1, right))
    raise ValueError(f"not a sum of dimensions: {ast.dump(tree)}")


# --- schemes: each yields choices of all sizes; some schemes are infinite ---

_PRIMES = (7, 5, 11, 3, 13, 17, 19, 23, 29, 31)
_BATCHES = (2, 1, 3, 5, 4, 7)
_RANKS = (2, 3, 4, 1)
_CHANGES: tuple[Callable[[int], int], ...] = (
    lambda n: max(1, n // 2),
    lambda n: n + 1,
    lambda n: max(1, n - 1),
    lambda n: 2 * n,
)
# Sizes for which networks are often designed: images, windows of audio, positions.
_USUAL = (16, 64, 128, 96, 224, 256, 320, 512, 80, 112, 160, 192, 48, 100, 299, 384, 416, 448, 480, 576, 640)

_Choices: TypeAlias = Iterator[dict[str, int]]
_Scheme: TypeAlias = Callable[[Dimensions, Bindings, int], _Choices]


def _fill(self: Dimensions, at: int, other: Mapping[str, int], batch: int | None = None) -> dict[str, int]:
    """A choice of all sizes: those that `other` states, the at-th small number for batches, past + present for
    totals."""
    alone = len(self.slots) == 1
    bindings: dict[str, int] = {}
    for slot in self.slots:
        if slot.role == Role.BATCH:
            # If the batch is the only dynamic dimension, it is not 1: a choice of all 1 is useless.
            numbers = [b for b in _BATCHES if b > 1] if alone else _BATCHES
            bindings[slot.name] = batch or numbers[at % len(numbers)]
        elif slot.role == Role.RANK:
            bindings[slot.name] = _RANKS[at % len(_RANKS)]
        else:
            bindings[slot.name] = other[slot.name]
    past = sum(bindings[s.name] for s in self.slots if s.role == Role.PAST)
    if past:
        present = next((bindings[s.name] for s in self.slots if s.role == Role.OTHER), 1)
        for slot in self.slots:
            if slot.role == Role.TOTAL:
                bindings[slot.name] = past + present
    return bindings


def _mine(self: Dimensions, bound: Bindings) -> _Choices:
    if any(slot.name in bound or slot.name in self.ranges for slot in self.slots):
        for bindings in [
            self.default(bound),
            *self.ends({n: b for n, b in bound.items() if n not in self.ranges}),
        ]:
            yield {slot.name: bindings[slot.name] for slot in self.slots}


def _primes(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
    """A different prime for each symbol."""
    for at in count():
        numbers = {s.name: _PRIMES[(2 * i + at + turn) % len(_PRIMES)] for i, s in enumerate(self.slots)}
        yield _fill(self, at, numbers)


def _ones(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
    """A different prime for each symbol, and 1 for one of them."""
    names = [slot.name for slot in self.slots if slot.role is Role.OTHER]
    for at, name in enumerate(names * len(_PRIMES)):
        base = next(islice(_primes(self, bound, turn), at, None))
        sizes = self.changed(base, {name: 1})
        yield {slot.name: sizes[slot.name] for slot in self.slots}


def _batch_only(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
    """The user's sizes, with other batches."""
    mine = self.default(bound)
    if any(slot.name in bound for slot in self.slots):
        for at in range(len(_BATCHES)):
            yield _fill(self, at, mine)


def _others_only(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
    """The user's sizes, with one dimension at a time halved, doubled or changed by one."""
    mine = {slot.name: self.default(bound)[slot.name] for slot in self.slots}
    if any(slot.name in bound for slot in self.slots):
        for change in _CHANGES:
            for slot in self.slots:
                if slot.role != Role.RANK:
                    yield mine | {slot.name: change(mine[slot.name])}


def _by_axis(step: int, equal: bool = False, batch: int | None = None) -> _Scheme:
    """A scheme of multiples of `step`: an axis has the same size in every input; with `equal`, all axes have the same
    size.
    """

    def scheme(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
        for at in count():
            primes = (2, 3, 1, 5, 4) if step > 1 else _PRIMES
            numbers = {
                s.name: step * primes[((0 if equal else 2 * s.axis) + at + turn) % len(primes)]
                for s in self.slots
            }
            yield _fill(self, at, numbers, batch)

    return scheme


def _usual(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
    """One size that networks often use for all dimensions, with small batches and with a batch of 1."""
    for at, size in enumerate(_USUAL):
        yield _fill(self, at, {s.name: size for s in self.slots})
    for at, size in enumerate(_USUAL):
        yield _fill(self, at, {s.name: size for s in self.slots}, 1)


def _partitions(self: Dimensions, bound: Bindings, turn: int) -> _Choices:
    """Every division of up to five dimensions into groups of equal size. Names of dimensions are ignored."""
    slots = [s for s in self.slots if s.role != Role.RANK]
    if not 2 <= len(slots) <= 5:
        return
    for at in range(3):
        for second in (_PRIMES[at + 1], 512, 256, 160):
            for classes in _set_partitions(len(slots)):
                sizes = [(2, 3, 5)[at], second, *_PRIMES[at + 2 :]]
                bindings = _fill(self, at, {s.name: 1 for s in self.slots})
                yield bindings | {s.name: sizes[k] for s, k in zip(slots, classes)}


def _set_partitions(n: int) -> Iterator[tuple[int, ...]]:
    """All partitions of n things into classes. A partition is a tuple with the class number of each thing."""

    def grow(prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(prefix) == n:
            yield prefix
            return
        for k in range(max(prefix, default=-1) + 2):
            yield from grow((*prefix, k))

    return grow(())


SCHEMES: tuple[_Scheme, ...] = (
    _primes,
    _ones,
    _batch_only,
    _by_axis(1),
    _others_only,
    _by_axis(8),
    _by_axis(16),
    _by_axis(32),
    _by_axis(1, equal=True),
    _by_axis(1, batch=1),
    _by_axis(8, equal=True),
    _by_axis(32, equal=True, batch=1),
    _usual,
    _partitions,
)
"""The schemes of choosing sizes, the most general first."""

FINITE: tuple[_Scheme, ...] = (_partitions, _usual)
"""Schemes that are run to their end, instead of a few choices at a time."""
