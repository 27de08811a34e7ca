"""Which sets of inputs two models are compared on: sizes, kinds of values, and how many of both fit.

Sizes: three choices that the original runs with, whatever they are; ones; then those around the numbers that either
model mentions (`numbers.py`), the most telling first. Values: ordinary ones at every size, every other kind at the
first. What a run costs is estimated from the graph, so that the same models are always compared on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice, zip_longest
from typing import Any, Generic, TypeVar

import numpy as np

from xrlflow.ir import FLOATS
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import is_float
from xrlflow.verify.dims import Bindings, Role
from xrlflow.verify.errors import InputsNeeded
from xrlflow.verify.inputs import Case, Feeds, InputPlan
from xrlflow.verify.numbers import around
from xrlflow.verify.runner import flat
from xrlflow.verify.values import Floats, Integers, Masks, Spread, Values

T = TypeVar("T")

# Bindings that are tried before the user is asked for inputs.
MAX_TRIES = 150
# Draws of values for one binding before it is given up.
_REDRAWS = 3
# Ordinary values: samples of the first choice of sizes, and one of each other, in turn.
_SAMPLES = 2
# Choices of sizes that are compared where dimensions are dynamic: at least and at most; attempts at those that tell.
LEAST_SIZES, _MOST_SIZES, _ATTEMPTS = 6, 12, 40
# Estimated seconds that all further sizes and all further values may take each, in units of which the first run is one
# if it is longer.
_SECONDS = 2.0
_LEAST_KINDS = 3
# Dimensions that are set to 0.
_EMPTY = 3
# Attempts at reaching a branch.
_SOUGHT = 64
# Bytes that one run's largest operator, and the inputs and outputs of one run, may take.
_WORKING, _KEPT = 2 << 30, 256 << 20
# Bytes of inputs that are drawn before it is known that the model runs with them.
_DRAWN = 64 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one run takes: seconds on a slow machine, bytes of its largest operator, bytes of inputs and outputs."""

    seconds: float
    working: float
    kept: float

    @property
    def too_large(self) -> str:
        """Why a run must not be made, if it must not."""
        largest = max(self.working / _WORKING, self.kept / _KEPT)
        return f"about {max(self.working, self.kept) / 2**30:.1f} GB" if largest > 1 else ""


@dataclass(slots=True)
class Drawn(Generic[T]):
    """Cases on which the original runs, with what was made of each. `left_out`: sizes that were not run, and why."""

    cases: list[tuple[Case, T]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def bindings(self) -> list[Bindings]:
        """The choices of sizes, each once."""
        return list({tuple(case.bindings.items()): case.bindings for case, _ in self.cases}.values())

    def has(self, bindings: Bindings) -> bool:
        return any(dict(case.bindings) == dict(bindings) for case, _ in self.cases)


@dataclass(frozen=True, slots=True)
class Drawing(Generic[T]):
    """How cases are drawn for one model.

    `attempt` makes something of a case (None: the original does not run), `sensible` says whether its sizes leave
    something to compare, `telling` whether a case of a kind of values that is not ordinary is evidence. `numbers`: for
    each symbol those that it is to be tried around; `further`: those that every symbol is to be tried around, once that
    is done. `estimate`: what a run takes.
    """

    plan: InputPlan
    attempt: Callable[[Case], T | None]
    sensible: Callable[[Case, T], bool] = lambda case, result: True
    telling: Callable[[Case, T], bool] = lambda case, result: True
    numbers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    further: Sequence[int] = ()
    estimate: Callable[[Bindings], Estimate] = lambda bindings: Estimate(0.0, 0.0, 0.0)
    seed: int = 0

    def all(self, samples: int = _SAMPLES, sizes: int = 3, tries: int = MAX_TRIES) -> Drawn[T]:
        """Everything that is worth a run.

        `samples` of ordinary values of the first binding, `sizes` bindings whatever they are. Raises InputsNeeded if
        too few work.
        """
        drawn = Drawn(self._first(samples, sizes, tries))
        base = drawn.cases[0][0].bindings
        self._kinds(drawn, base)
        if self.plan.dynamic:
            self._sizes(drawn)
        return drawn

    # --- sizes that work ---

    def _first(self, samples: int, wanted: int, tries: int) -> list[tuple[Case, T]]:
        """Ordinary values at `wanted` bindings that work, never of ones only, and the user's own if it has only ones.

        Bindings that are not sensible are taken only if there are too few others.
        """
        plan = self.plan
        if not plan.dynamic:
            # Masks and indices have three usual kinds.
            found = self._samples({}, range(samples if _floats_only(plan) else max(3, samples)))
            if not found:
                raise InputsNeeded(
                    "the original fails on every input drawn for it: give inputs that it runs on with --inputs data.npz"
                )
            return found
        found = []
        mine = plan.dimensions.default(plan.bound)
        if all(
            mine.get(s.name) == 1 and s.name in plan.bound
            for s in plan.dimensions.slots
            if s.role != Role.RANK
        ):
            found.extend(self._samples(mine, range(samples)))
        working, tried = 0, 0
        spare: list[list[tuple[Case, T]]] = []
        for bindings in self._candidates(tries):
            tried += 1
            cases = self._samples(bindings, range(samples) if not working else [(working + 1) % 3])
            if not all(self.sensible(case, result) for case, result in cases):
                spare.extend([cases] if len(spare) < wanted else [])
                continue
            found.extend(cases)
            working += bool(cases)
            if working == wanted:
                return found
        for cases in spare[: wanted - working]:
            found.extend(cases)
            working += 1
        if working == wanted:
            return found
        symbols = ", ".join(slot.name for slot in plan.dimensions.slots)
        raise InputsNeeded(
            f"the original runs with {working} of the {tried} choices tried for its dimensions ({symbols}), and "
            f"{wanted} are needed: give inputs that it runs on with --inputs data.npz"
        )

    def _candidates(self, tries: int) -> list[dict[str, int]]:
        """Bindings to try, with the user's own, but none whose inputs take long to draw: where the model runs with few,
        most would be drawn for nothing. If all of them do, the model is one of large inputs.
        """
        plan = self.plan
        found = [*islice(plan.dimensions.candidates(plan.bound, self.seed), tries)]
        mine = plan.dimensions.default(plan.bound) if plan.bound else None
        return [b for b in found if b == mine or plan.nbytes(b) <= _DRAWN] or found

    def _samples(self, bindings: Bindings, samples: Iterable[int]) -> list[tuple[Case, T]]:
        """The samples of one binding on which the model runs; values are drawn again a few times."""
        found: list[tuple[Case, T]] = []
        # Other values cannot help a model of floats only.
        redraws = 1 if _floats_only(self.plan) else _REDRAWS
        for sample in samples:
            for redraw in range(redraws + 1):
                cautious = redraw == redraws
                if cautious and redraws == 1:
                    break
                case = self.plan.case(bindings, self.seed + 7919 * redraw, sample, cautious)
                result = self.attempt(case)
                if result is not None:
                    found.append((case, result))
                    break
            if not found:
                break
        return found

    # --- further values ---

    def _kinds(self, drawn: Drawn[T], bindings: Bindings) -> None:
        """Every kind of values that makes a difference, as many as there is time for."""
        seconds = self.estimate(bindings).seconds
        left = max(_LEAST_KINDS, int(_SECONDS / seconds) if seconds else 1 << 30)
        for values in self.plan.takes().kinds():
            if left <= 0:
                drawn.left_out.append(values.name)
                continue
            found = self.of(bindings, values)
            if found is not None:
                drawn.cases.append(found)
                left -= 1

    def of(self, bindings: Bindings, values: Values) -> tuple[Case, T] | None:
        """A case of some kind of values that is evidence; of large values that are none, smaller ones."""
        for kind in (values, *_milder(values)):
            case = self.plan.case(bindings, self.seed, 0, values=kind)
            result = self.attempt(case)
            if result is not None and self.telling(case, result):
                return case, result
        return None

    def seeking(self, bindings: Sequence[Bindings], numbers: Iterable[float]) -> Iterator[Case]:
        """Cases of many kinds, in the hope that some take another branch. `numbers`: what conditions are made from.

        `bindings` are taken in turn.
        """
        seconds = max(self.estimate(choice).seconds for choice in bindings)
        most = max(12, min(_SOUGHT, int(2 * _SECONDS / seconds) if seconds else _SOUGHT))
        for sample in range(1, 5):  # lengths, trip counts and flags go by the sample
            yield self.plan.case(bindings[0], self.seed + 104729, sample)
        near = sorted(
            {n * k for n in numbers if n and abs(n) <= 1e9 for k in (1.0, 1.01, 0.99, -1.0, 2.0)}, key=abs
        )
        fills = [Floats(Spread.FILLED, n) for n in near]
        scales = [
            Floats(spread, 10.0**k) for k in (4, -4, 2, 6, 1) for spread in (Spread.NORMAL, Spread.UNIFORM)
        ]
        rest = [Floats(Spread.FILLED, n) for n in (0.0, 1.0, -1.0, 100.0, -100.0)]
        mixed = [kind for pair in zip_longest(scales, fills, rest) for kind in pair if kind is not None]
        integers = (Integers.WIDE, Integers.ENDS, Integers.USUAL)
        masks = (Masks.USUAL, Masks.USUAL, Masks.EMPTY)
        for at, floats in enumerate(islice(cycle(mixed), most)):
            shown = f"{floats.spread.value} values, {floats.scale:g}"
            values = Values(shown, floats, integers[at % 3], masks[at % 3])
            yield self.plan.case(bindings[at % len(bindings)], self.seed + 104729 * at, at % 5, values=values)

    # --- further sizes ---

    def _sizes(self, drawn: Drawn[T]) -> None:
        """Ones, then sizes around the numbers that the models mention, then any, until there are enough."""
        bases = drawn.bindings
        left = max(_SECONDS, 4 * self.estimate(bases[0]).seconds)
        count, attempts = len(bases), 0
        telling = ((choices, _MOST_SIZES) for choices in self._choices(bases))
        filling = (([chosen], LEAST_SIZES) for chosen in self._others())
        for at, (choices, most) in enumerate(chain(telling, filling)):
            for chosen in choices:
                if count >= most or attempts >= _ATTEMPTS:
                    return
                if drawn.has(chosen):
                    break
                estimate = self.estimate(chosen)
                if estimate.too_large or (estimate.seconds > left and (most > LEAST_SIZES or count >= most)):
                    reason = estimate.too_large or f"about {estimate.seconds:.1f} s, more than is left"
                    drawn.left_out.append(f"{', '.join(f'{k}={v}' for k, v in chosen.items())} ({reason})")
                    continue
                attempts += 1
                found = self._samples(chosen, [at % 3])
                if found and all(self.sensible(*item) for item in found):
                    drawn.cases.extend(found)
                    left -= estimate.seconds
                    count += 1
                    break

    def _choices(self, bases: Sequence[Bindings]) -> Iterator[list[dict[str, int]]]:
        """Choices of sizes, the most telling first. Of each list one is enough: the first that works.

        Where all symbols at once fail they are tried one at a time, and then together with those that were equal to
        them in what worked: what has to be equal is.
        """
        slots = [s for s in self.plan.dimensions.slots if s.role != Role.RANK]
        further = [size for n in self.further for size in (n + 1, n, n - 1)]
        lists = {
            slot.name: list(dict.fromkeys([*around(self.numbers.get(slot.name, {})), *further]))
            for slot in slots
        }
        rows = [
            {name: found[i] for name, found in lists.items() if i < len(found)}
            for i in range(max(map(len, lists.values()), default=0))
        ]
        plain = [s.name for s in slots if s.role != Role.BATCH]
        rows[2:2] = [dict.fromkeys(plain or lists, 1)]
        for at, row in enumerate(rows):
            base = bases[at % len(bases)]
            singles = [{name: number} for name, number in row.items()]
            tied = [{other: n for other in lists if base[other] == base[name]} for name, n in row.items()]
            options = []
            for change in (row, *singles, *tied):
                chosen = self.plan.dimensions.changed(base, change)
                if chosen not in options:
                    options.append(chosen)
            yield options

    def empty(self, bindings: Bindings) -> Iterator[Case]:
        """Cases in which one dimension is 0, those that are no batch first."""
        slots = [s for s in self.plan.dimensions.slots if s.role != Role.RANK]
        for slot in sorted(slots, key=lambda s: s.role == Role.BATCH)[:_EMPTY]:
            chosen = self.plan.dimensions.changed(bindings, {slot.name: 0})
            yield self.plan.case(chosen, self.seed, 0)

    def _others(self) -> Iterator[dict[str, int]]:
        """Any further sizes, where the models mention too few numbers."""
        dimensions = self.plan.dimensions
        yield from islice(dimensions.candidates(self.plan.bound, self.seed), MAX_TRIES)
        for number in (6, 8, 9, 16):
            yield dimensions.complete({s.name: number for s in dimensions.slots})


def _floats_only(plan: InputPlan) -> bool:
    return all(p.type.dtype in FLOATS for p in plan.ports)


def _milder(values: Values) -> Iterator[Values]:
    """The same with smaller magnitudes."""
    kind = values.floats
    if kind.spread is Spread.NORMAL and kind.scale > 1:
        for scale in (kind.scale / 2**5, kind.scale / 2**8):
            yield Values(f"values of {scale:g}", Floats(Spread.NORMAL, scale), values.integers, values.masks)


def is_whole(outputs: Sequence[Any]) -> bool:
    """Whether every float of some outputs is finite."""
    arrays = [a for output in outputs for _, a in flat(output) if is_float(a)]
    return all(bool(np.isfinite(a.astype(np.complex128)).all()) for a in arrays)


def feeds_for_measurement(
    imported: ImportedModel, seed: int = 0, runs: Callable[[Feeds], bool] | None = None
) -> dict[str, Any]:
    """One set of inputs at the user's dimensions, by default those that the cost model takes (batch 1).

    With `runs` (whether the model runs on some inputs), other values and then other dimensions are tried until it
    does. Raises InputsNeeded if nothing that is tried runs.
    """
    plan = InputPlan.of(imported)
    usual = plan.dimensions.default(plan.bound)
    if runs is None:
        return dict(plan.case(usual, seed, 0).feeds)

    def attempt(case: Case) -> bool | None:
        return runs(case.feeds) or None

    drawing = Drawing(plan, attempt, seed=seed)
    for bindings in [
        usual,
        *(drawing._candidates(MAX_TRIES) if plan.dynamic else []),
    ]:
        found = drawing._samples(bindings, [0])
        if found:
            return dict(found[0][0].feeds)
    raise InputsNeeded(
        "no inputs could be drawn on which the model runs: give some with --inputs data.npz, or shapes with --shape"
    )
