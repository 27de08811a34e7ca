"""The inputs on which two models are compared: sizes of dimensions, kinds of values, and how many of both a time
budget allows.

Sizes: first three choices with which the original runs; next all ones; last sizes around the numbers that either model
mentions (`numbers.py`), of which those that find most mistakes come first. Values: ordinary ones for every choice of
sizes, and each other kind for the first choice. The time of a run is estimated from the graph, so that the same models
are always compared on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice, zip_longest
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.ir import FLOATS
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import is_float
from xrlflow.verify.dims import Bindings, Role
from xrlflow.verify.errors import InputsNeeded
from xrlflow.verify.inputs import Case, Feeds, InputPlan
from xrlflow.verify.numbers import around
from xrlflow.verify.runner import first_line, flat
from xrlflow.verify.values import Floats, Integers, Masks, Spread, Values

T = TypeVar("T")

# Choices of sizes that are tried before the user is asked for inputs.
MAX_TRIES = 150
# How often values are drawn for one choice of sizes on which the original fails, before the next is tried.
_REDRAWS = 3
# Samples of ordinary values for the first choice of sizes. Every other choice gets one.
_SAMPLES = 2
# For models with dynamic dimensions: the minimum and the maximum number of choices of sizes, and how many further
# choices are attempted.
LEAST_SIZES, _MOST_SIZES, _ATTEMPTS = 6, 12, 40
# Estimated seconds that the runs with further sizes may take together, and likewise those with further values;
# _LEAST_KINDS kinds of values are run in any case.
_SECONDS = 2.0
# The cost of one choice of sizes, in runs of the original: the runs of both models and the float64 evaluations of the
# original.
_COMPARED = 20.0
_LEAST_KINDS = 3
# How many dimensions are set to 0, one at a time.
_EMPTY = 3
# The number of inputs drawn to reach a branch.
_SOUGHT = 64
# Limits in bytes: on the largest operator of a run, and on the inputs and outputs of a run.
_WORKING, _KEPT = 2 << 30, 256 << 20
# Limit in bytes on the inputs with which a model is first run.
_SETTING_SIZES = 40  # choices of sizes that are tried for a choice of flags
_DRAWN = 64 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one run on a slow machine."""

    seconds: float
    working: float  # bytes of the largest operator
    exchanged: float  # bytes of inputs and outputs

    @property
    def too_large(self) -> str:
        """The reason why this run is too large; "" if it is not."""
        largest = max(self.working / _WORKING, self.exchanged / _KEPT)
        return f"about {max(self.working, self.exchanged) / 2**30:.1f} GB" if largest > 1 else ""


@dataclass(slots=True)
class SampledCases(Generic[T]):
    """Cases on which the original runs, each with the result of `attempt`. `left_out`: sizes not run, with reasons."""

    cases: list[tuple[Case, T]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def bindings(self) -> list[Bindings]:
        """The choices of sizes, each once."""
        return list({tuple(case.bindings.items()): case.bindings for case, _ in self.cases}.values())

    def has(self, bindings: Bindings) -> bool:
        return any(dict(case.bindings) == dict(bindings) for case, _ in self.cases)


@dataclass(frozen=True, slots=True)
class CaseSampler(Generic[T]):
    """Draws the cases for one model, from a seed."""

    plan: InputPlan
    attempt: Callable[[Case], T | None]  # runs a case; returns None if the original fails
    sensible: Callable[[Case, T], bool] = lambda case, result: True
    """Whether the outputs at a case's sizes have anything to compare."""
    telling: Callable[[Case, T], bool] = lambda case, result: True
    """Whether the outputs of a case with unusual values can reveal a mistake."""
    numbers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """For each symbol, the numbers around which sizes are chosen, with weights."""
    further: Sequence[int] = ()  # numbers for all symbols, used after `numbers`
    estimate: Callable[[Bindings], Estimate] = lambda bindings: Estimate(0.0, 0.0, 0.0)
    seed: int = 0

    def all(self, samples: int = _SAMPLES, sizes: int = 3, tries: int = MAX_TRIES) -> SampledCases[T]:
        """All cases on which the models are compared.

        The first choice of sizes has `samples` cases of ordinary values. With dynamic dimensions there are at least
        `sizes` choices. Raises InputsNeeded if the original runs with fewer choices than that.
        """
        sampled = SampledCases(self._first(samples, sizes, tries))
        self._settings(sampled)
        self._kinds(sampled)
        if self.plan.dynamic:
            self._sizes(sampled)
        return sampled

    # --- sizes that work ---

    def _first(self, samples: int, count: int, tries: int) -> list[tuple[Case, T]]:
        """Cases of ordinary values for `count` choices of sizes with which the original runs.

        A user's choice of all 1 is added and does not count. Choices whose outputs have nothing to compare are used
        only if there are too few choices besides.
        """
        plan = self.plan
        if not plan.dynamic:
            # Masks and indices have three kinds of ordinary values, one for each sample.
            runs = self._samples({}, range(samples if _floats_only(plan) else max(3, samples)))
            if not runs:
                raise InputsNeeded(
                    "the original fails on every input drawn for it: give inputs that it runs on with --inputs data.npz"
                )
            return runs
        runs = []
        mine = plan.dimensions.default(plan.bound)
        if all(
            mine.get(s.name) == 1 and s.name in plan.bound
            for s in plan.dimensions.slots
            if s.role != Role.RANK
        ):
            runs.extend(self._samples(mine, range(samples)))
        working, tried = 0, 0
        spare: list[list[tuple[Case, T]]] = []
        for bindings in self._candidates(tries):
            if runs and deadline.over():
                return runs
            tried += 1
            cases = self._samples(bindings, range(samples) if not working else [(working + 1) % 3])
            if not all(self.sensible(case, result) for case, result in cases):
                spare.extend([cases] if len(spare) < count else [])
                continue
            runs.extend(cases)
            working += bool(cases)
            if working == count:
                return runs
        for cases in spare[: count - working]:
            runs.extend(cases)
            working += 1
        if working == count:
            return runs
        symbols = ", ".join(slot.name for slot in plan.dimensions.slots)
        raise InputsNeeded(
            f"the original runs with {working} of the {tried} choices tried for its dimensions ({symbols}), and "
            f"{count} are needed: give inputs that it runs on with --inputs data.npz"
        )

    def _candidates(self, tries: int) -> list[dict[str, int]]:
        """The choices of sizes to try: the user's own, and those whose inputs have at most `_DRAWN` bytes. If no
        choice is so small, all choices.
        """
        plan = self.plan
        candidates = [*islice(plan.dimensions.candidates(plan.bound, self.seed), tries)]
        mine = [plan.dimensions.default(plan.bound)] if plan.bound else []
        mine += plan.dimensions.ends(plan.bound)
        return [b for b in candidates if b in mine or plan.nbytes(b) <= _DRAWN] or candidates

    def _samples(
        self, bindings: Bindings, samples: Iterable[int], setting: bool = True
    ) -> list[tuple[Case, T]]:
        """The cases of one choice of sizes on which the model runs, at most one for each of `samples`.

        On failure, values are drawn again a few times, and at last flags are set (unless `setting` is false): with a
        cache, a decoder may take one token only. If the model does not run on the first sample, further samples are not
        tried.
        """
        cases: list[tuple[Case, T]] = []
        # If all inputs are floats, drawing other values does not make the model run.
        redraws = 1 if _floats_only(self.plan) else _REDRAWS
        for sample in samples:
            if cases and deadline.over():
                break
            for redraw in range(redraws + 1):
                cautious = redraw == redraws
                if cautious and redraws == 1:
                    break
                case = self.plan.case(bindings, self.seed + 7919 * redraw, sample, cautious)
                result = self.attempt(case)
                if result is not None:
                    cases.append((case, result))
                    break
            for flags in self.plan.settings if setting and not cases else ():
                case = self.plan.case(bindings, self.seed, sample, setting=flags)
                result = self.attempt(case)
                if result is not None:
                    cases.append((case, result))
                    break
            if not cases:
                break
        return cases

    # --- further values ---

    def _settings(self, sampled: SampledCases[T]) -> None:
        """Add a case of ordinary values for each choice of flags that has none, at sizes at which the original runs."""
        for setting in self.plan.settings:
            if any(self.plan.setting(case) == tuple(setting.values()) for case, _ in sampled.cases):
                continue
            sizes = [*sampled.bindings, *self._candidates(_SETTING_SIZES)] if self.plan.dynamic else [{}]
            cases = (self.plan.case(bindings, self.seed, 0, setting=setting) for bindings in sizes)
            runs = ((case, result) for case in cases if (result := self.attempt(case)) is not None)
            found = None if deadline.over() else next(runs, None)
            if found is None:
                sampled.left_out.append(", ".join(f"{name}={value}" for name, value in setting.items()))
            else:
                sampled.cases.append(found)

    def _kinds(self, sampled: SampledCases[T]) -> None:
        """Add a case for each further kind of values and each choice of flags, until the estimated time is used up."""
        places = self._places(sampled)
        seconds = max(self.estimate(bindings).seconds for bindings, _ in places)
        runs_left = len(places) * max(_LEAST_KINDS, int(_SECONDS / seconds) if seconds else 1 << 30)
        for values in self.plan.traits().kinds():
            if runs_left <= 0 or deadline.over():
                sampled.left_out.append(values.name)
                continue
            for bindings, setting in places:
                case = self.of(bindings, values, setting)
                if case is not None:
                    sampled.cases.append(case)
                    runs_left -= 1

    def _places(self, sampled: SampledCases[T]) -> list[tuple[Bindings, Mapping[str, bool]]]:
        """Sizes and flags with which the original runs: the first sizes for each choice of flags."""
        if not self.plan.settings:
            return [(sampled.cases[0][0].bindings, {})]
        first: dict[tuple[bool, ...], Bindings] = {}
        for case, _ in sampled.cases:
            first.setdefault(self.plan.setting(case), case.bindings)
        names = list(self.plan.settings[0])
        return [(bindings, dict(zip(names, values))) for values, bindings in first.items()]

    def of(
        self, bindings: Bindings, values: Values, setting: Mapping[str, bool] = MappingProxyType({})
    ) -> tuple[Case, T] | None:
        """A case with this kind of values, and these flags, that can reveal a mistake; None if there is none.

        If outputs overflow with large values, smaller ones are tried.
        """
        for kind in (values, *_milder(values)):
            case = self.plan.case(bindings, self.seed, 0, values=kind, setting=setting)
            result = self.attempt(case)
            if result is not None and self.telling(case, result):
                return case, result
        return None

    def seeking(self, bindings: Sequence[Bindings], numbers: Iterable[float]) -> Iterator[Case]:
        """Cases with many kinds of values, drawn to reach branches that no case has reached. The choices of sizes in
        `bindings` alternate.

        `numbers`: constants from which conditions are computed.
        """
        seconds = max(self.estimate(choice).seconds for choice in bindings)
        maximum = max(12, min(_SOUGHT, int(2 * _SECONDS / seconds) if seconds else _SOUGHT))
        for sample in range(1, 5):  # the sample decides lengths, trip counts and flags
            yield self.plan.case(bindings[0], self.seed + 104729, sample)
        near = sorted(
            {n * k for n in numbers if n and abs(n) <= 1e9 for k in (1.0, 1.01, 0.99, -1.0, 2.0)}, key=abs
        )
        fills = [Floats(Spread.FILLED, n) for n in near]
        scales = [
            Floats(spread, 10.0**k) for k in (4, -4, 2, 6, 1) for spread in (Spread.NORMAL, Spread.UNIFORM)
        ]
        constants = [Floats(Spread.FILLED, n) for n in (0.0, 1.0, -1.0, 100.0, -100.0)]
        mixed = [kind for pair in zip_longest(scales, fills, constants) for kind in pair if kind is not None]
        integers = (Integers.WIDE, Integers.ENDS, Integers.USUAL)
        masks = (Masks.USUAL, Masks.USUAL, Masks.EMPTY)
        for at, floats in enumerate(islice(cycle(mixed), maximum)):
            shown = f"{floats.spread.value} values, {floats.scale:g}"
            values = Values(shown, floats, integers[at % 3], masks[at % 3])
            yield self.plan.case(bindings[at % len(bindings)], self.seed + 104729 * at, at % 5, values=values)

    # --- further sizes ---

    def _sizes(self, sampled: SampledCases[T]) -> None:
        """Add a case with all sizes 1, then cases with sizes around the numbers that the models mention, then cases
        with other sizes, until there are enough.
        """
        bases = sampled.bindings
        seconds_left = min(
            max(_SECONDS, 4 * self.estimate(bases[0]).seconds), deadline.remaining() / _COMPARED
        )
        count, attempts = len(bases), 0
        telling = ((choices, _MOST_SIZES) for choices in self._choices(bases))
        filling = (([bindings], LEAST_SIZES) for bindings in self._others())
        for at, (choices, maximum) in enumerate(chain(telling, filling)):
            for bindings in choices:
                if count >= maximum or attempts >= _ATTEMPTS:
                    return
                if deadline.over():
                    sampled.left_out.append("other sizes (there was no time)")
                    return
                if sampled.has(bindings):
                    break
                estimate = self.estimate(bindings)
                if estimate.too_large or (
                    estimate.seconds > seconds_left and (maximum > LEAST_SIZES or count >= maximum)
                ):
                    reason = estimate.too_large or f"about {estimate.seconds:.1f} s, more than is left"
                    sampled.left_out.append(
                        f"{', '.join(f'{k}={v}' for k, v in bindings.items())} ({reason})"
                    )
                    continue
                attempts += 1
                cases = self._samples(bindings, [at % 3])
                if cases and all(self.sensible(*item) for item in cases):
                    sampled.cases.extend([*cases, *self._other_settings(cases[0][0])])
                    seconds_left -= estimate.seconds
                    count += 1
                    break

    def _other_settings(self, case: Case) -> Iterator[tuple[Case, T]]:
        """The case with each other choice of flags with which the original runs."""
        for setting in self.plan.settings:
            if tuple(setting.values()) != self.plan.setting(case):
                other = self.plan.case(case.bindings, self.seed, case.sample, setting=setting)
                result = self.attempt(other)
                if result is not None and self.sensible(other, result):
                    yield other, result

    def _choices(self, bases: Sequence[Bindings]) -> Iterator[list[dict[str, int]]]:
        """Lists of choices of sizes, the most revealing list first. The caller uses the first choice of each list with
        which the original runs.

        Each list changes one of `bases`: first all symbols at once, next each symbol alone, last each symbol together
        with the symbols that have the same size in the base (the model may require that they are equal).
        """
        slots = [s for s in self.plan.dimensions.slots if s.role != Role.RANK]
        further = [size for n in self.further for size in (n + 1, n, n - 1)]
        lists = {
            slot.name: list(dict.fromkeys([*around(self.numbers.get(slot.name, {})), *further]))
            for slot in slots
        }
        rows = [
            {name: sizes[i] for name, sizes in lists.items() if i < len(sizes)}
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
                bindings = self.plan.dimensions.changed(base, change)
                if bindings not in options:
                    options.append(bindings)
            yield options

    def empty(self, bindings: Bindings) -> Iterator[Case]:
        """Cases in each of which one dimension has size 0. Batch dimensions come last."""
        slots = [s for s in self.plan.dimensions.slots if s.role != Role.RANK]
        for slot in sorted(slots, key=lambda s: s.role == Role.BATCH)[:_EMPTY]:
            changed = self.plan.dimensions.changed(bindings, {slot.name: 0})
            yield self.plan.case(changed, self.seed, 0)

    def _others(self) -> Iterator[dict[str, int]]:
        """Further sizes, if the models mention too few numbers."""
        dimensions = self.plan.dimensions
        yield from islice(dimensions.candidates(self.plan.bound, self.seed), MAX_TRIES)
        for number in (6, 8, 9, 16):
            yield dimensions.complete({s.name: number for s in dimensions.slots})


def _floats_only(plan: InputPlan) -> bool:
    return all(p.type.dtype in FLOATS for p in plan.ports)


def _milder(values: Values) -> Iterator[Values]:
    """The same kind of values with smaller magnitudes, largest first."""
    kind = values.floats
    if kind.spread is Spread.NORMAL and kind.scale > 1:
        for scale in (kind.scale / 2**5, kind.scale / 2**8):
            yield Values(f"values of {scale:g}", Floats(Spread.NORMAL, scale), values.integers, values.masks)


def is_whole(outputs: Sequence[Any]) -> bool:
    """Whether all floats in these outputs are finite."""
    arrays = [a for output in outputs for _, a in flat(output) if is_float(a)]
    return all(bool(np.isfinite(a.astype(np.complex128)).all()) for a in arrays)


def feeds_for_measurement(
    imported: ImportedModel, seed: int = 0, run: Callable[[Feeds], object] | None = None
) -> dict[str, Any]:
    """One set of inputs at the user's sizes. Open dimensions have the sizes of the cost model (batch 1).

    `run` runs the model on some inputs, and raises BackendError if that fails, or OutOfTime if the run takes long.
    After a failure other values are tried, and if these fail other sizes; after OutOfTime, smaller sizes.

    Raises InputsNeeded if the model runs on no inputs, and OutOfTime if no run succeeded before the deadline
    (`deadline`), or if all runs that work take long.
    """
    plan = InputPlan.of(imported)
    usual = plan.dimensions.default(plan.bound)
    if run is None:
        return dict(plan.case(usual, seed, 0).feeds)

    failures: list[str] = []

    def attempt(case: Case) -> bool | None:
        try:
            run(case.feeds)
        except OutOfTime:
            raise
        except BackendError as error:  # the run may succeed on other inputs
            failures.append(first_line(error))
            return None
        return True

    sampler = CaseSampler(plan, attempt, seed=seed)
    late: OutOfTime | None = None
    # With a cache, one token is measured rather than a prompt.
    first = [usual, *plan.dimensions.ones(usual, plan.bound)] if plan.dynamic and plan.settings else []
    candidates = [*first, usual, *(sampler._candidates(MAX_TRIES) if plan.dynamic else [])][::-1]
    setting_from = len(candidates) - len(first)
    while candidates:
        setting = len(candidates) <= setting_from
        bindings = candidates.pop()
        if deadline.over():
            raise OutOfTime(
                "no inputs were found on which the model runs: the time for it was over"
            ) from late
        try:
            cases = sampler._samples(bindings, [0], setting)
        except OutOfTime as error:
            if late is None:  # the user's own sizes are never replaced
                candidates = [
                    b for b in candidates if all(b[n] == plan.bound[n] for n in plan.bound.keys() & b.keys())
                ]
                candidates += reversed([*_smaller(plan, bindings)])
            late = error
            continue
        if cases:
            return dict(cases[0][0].feeds)
    if late is not None:
        raise late
    raise InputsNeeded(
        "no inputs could be drawn on which the model runs: give some with --inputs data.npz, or shapes with --shape",
        next(iter(failures), ""),
    )


def feeds_at_other_sizes(
    imported: ImportedModel, run: Callable[[Feeds], object], seed: int = 0, usual: Bindings | None = None
) -> tuple[list[tuple[str, dict[str, Any]]], tuple[str, ...]]:
    """Inputs with few and with many elements: the least and the greatest sizes of the user's ranges; without ranges,
    dimensions that the user does not state are an eighth, and four times, of `usual` (default: what
    `feeds_for_measurement` tries first), and so is the number of an image's pixels. Also inputs with the other values
    of flags. Only those with which the model runs (`run` raises BackendError if it fails).

    Returns texts that say the sizes, with the inputs; and which of the user's sizes are not among them, with reasons.
    """
    plan = InputPlan.of(imported)
    first = plan.dimensions.default(plan.bound)
    usual = plan.dimensions.changed(first, {n: d for n, d in (usual or {}).items() if n in first})
    free = [s.name for s in plan.dimensions.slots if s.name not in plan.bound and s.role is not Role.RANK]
    ends = plan.dimensions.ends(plan.bound)
    larger = [n for n in free if usual[n] > 1]  # a dimension of 1 may have to be 1
    found: list[tuple[str, dict[str, Any]]] = []

    def ran(bindings: Bindings, setting: Mapping[str, bool] = MappingProxyType({})) -> bool:
        text = ", ".join(f"{name}={size}" for name, size in {**bindings, **setting}.items())
        if plan.nbytes(bindings) > _DRAWN:
            missed.append(f"{text} (the inputs are over {_DRAWN >> 20} MB)")
            return False
        feeds = dict(plan.case(bindings, seed, 0, setting=setting).feeds)
        try:
            run(feeds)
        except BackendError as error:
            missed.append(f"{text} (the model fails: {first_line(error)})")
            return False
        found.append((text, feeds))
        return True

    missed: list[str] = []
    for bindings in ends:
        ran(bindings)
    stated = tuple(missed)  # of other sizes it is nothing special if the model does not take them
    for factor in () if ends else (0.125, 4):
        for names in (free, larger):
            sizes = plan.dimensions.changed(usual, plan.dimensions.scaled(usual, names, factor))
            if sizes == usual or ran(sizes):
                break
    for setting in plan.settings[1:]:
        ran(first, setting)
    return found, stated


def _smaller(plan: InputPlan, bindings: Bindings) -> Iterator[dict[str, int]]:
    """Smaller sizes: those that the user does not state are divided by 4, by 16 and by 64."""
    before = dict(bindings)
    free = [s.name for s in plan.dimensions.slots if s.name not in plan.bound and s.role is not Role.RANK]
    for part in (4, 16, 64):
        fewer = {name: max(1, bindings[name] // part) for name in free}
        smaller = plan.dimensions.changed(bindings, fewer)
        if smaller != before:
            yield smaller
        before = smaller
