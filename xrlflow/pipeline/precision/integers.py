"""Quantises layers to 8 bits after training: those that gain most time, as long as the outputs' error stays within a
bound.

ONNX Runtime's library quantises (`quantize_static`: activations u8 by tensor, weights s8 by channel, as pairs of
QuantizeLinear and DequantizeLinear). Which layers it quantises is decided here, from measurements.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.onnxruntime.saturation import saturates
from xrlflow.backends.protocol import one_line
from xrlflow.onnxio import protos
from xrlflow.options import OptionError
from xrlflow.pipeline.precision.calibration import Deviation, Outputs, Sets, deviation, run_all
from xrlflow.pipeline.precision.naming import name_nodes, restore

WEIGHTED = ("Conv", "Gemm", "MatMul")
# What keeps bytes as they are between two quantised layers. Reshape and Transpose would do so, too, but at opset 21 and
# above ONNX Runtime does not load some models with these between a DequantizeLinear and its reader.
_PASSING = ("Relu", "Clip", "MaxPool")
# Seconds of measuring the gain of one group of layers.
_TIMING = 0.8
# How much the error budget shrinks at least when a selection exceeds the bound, and how often it shrinks at most.
_SHRINK, _SELECTIONS = 0.8, 12
# Seconds that selections may take longer than planned, since all measurements would be lost.
_LATE = 5.0


# The part of the bound that a selection may use. Optimising rounds differently, so the error of the result is slightly
# different.
_MARGIN = 0.98


@dataclass(frozen=True, slots=True)
class Layer:
    """A node that can be quantised: its unique name in the copy, and a name for reports."""

    name: str
    shown: str


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring layers, which are quantised together or not at all."""

    layers: tuple[Layer, ...]
    gain: float = 0.0
    """Seconds that a run takes longer if all layers but these are quantised."""
    error: float = 0.0
    """The `Deviation.rms` on the calibrating sets if only these are quantised; 0: not measured."""

    def halves(self) -> list[Group]:
        """Two groups of half the layers, whose gains are taken as proportional; this group if it is one layer."""
        middle = len(self.layers) // 2
        if not middle:
            return [self]
        parts = self.layers[:middle], self.layers[middle:]
        return [Group(part, self.gain * len(part) / len(self.layers)) for part in parts]


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised model (serialised), the layers that are in 8 bits, and the error on the checking sets."""

    model: bytes
    layers: tuple[Layer, ...]
    error: Deviation


def select(groups: Sequence[Group], budget: float) -> tuple[Group, ...]:
    """Groups with a large sum of gains whose errors together are at most `budget`.

    Errors of different layers are taken as independent, so their squares add up. Groups without a gain are left out.
    Then groups with the least gain for their squared error are left out one after the other, until the rest fits (the
    greedy solution of the knapsack problem); last, groups that fit nevertheless return.
    """
    useful = sorted((g for g in groups if g.gain > 0.0), key=lambda g: -g.gain / max(g.error**2, 1e-30))
    total, chosen = 0.0, []
    for group in useful:
        if total + group.error**2 <= budget**2:
            total += group.error**2
            chosen.append(group)
    return tuple(group for group in groups if group in chosen)


@dataclass(slots=True)
class Quantiser:
    """Quantises subsets of a model's layers. `model` (opset 13 or later) is changed: every node gets a unique name."""

    model: onnx.ModelProto
    sets: Sets
    folder: Path
    _names: dict[str, str] = field(default_factory=dict, init=False)  # original names by unique names

    def __post_init__(self) -> None:
        self._names = name_nodes(self.model)
        graph = self.model.graph
        # Without a type the library leaves an activation as it is; types behind operators of other domains are unknown
        # to it. A weight's type is that of the layer's other tensors, too.
        known = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
        by_name = {node.name: node for node in graph.node}
        for layer in self.layers:
            for name in (by_name[layer.name].input[0], by_name[layer.name].output[0]):
                if name not in known:
                    known.add(name)
                    graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The nodes of the main graph that can be quantised: their weights are constants in float32."""
        graph = self.model.graph
        inputs = {value.name for value in graph.input}  # a caller may pass other weights for these
        weights = {
            t.name: len(t.dims) for t in graph.initializer
            if t.data_type == TensorProto.FLOAT and t.name not in inputs and np.prod(t.dims)
        }  # fmt: skip
        found = []
        for node in graph.node:
            if node.domain in ("", "ai.onnx") and node.op_type in WEIGHTED:
                rank = weights.get(node.input[1], 0)
                if node.input[0] not in weights and (rank > 2 if node.op_type == "Conv" else rank == 2):
                    found.append(Layer(node.name, self._names.get(node.name, node.name) or node.output[0]))
        return tuple(found)

    def quantised(self, layers: Collection[Layer]) -> bytes:
        """The model with these layers in 8 bits. Raises OptionError if the library cannot quantise them."""
        library = _library()
        names = {layer.name for layer in layers}
        copy = _with_own_weights(self.model, names)
        names |= {n.name for n in copy.graph.node if n.op_type in _PASSING and n.domain in ("", "ai.onnx")}
        reader = _reader(library, self.sets.calibrating)
        more: dict[str, Any] = {}
        if "calibration_cache_path" in inspect.signature(library.quantize_static).parameters:
            # Ranges are taken of all layers, whichever are quantised, and only the first time.
            more["calibration_cache_path"] = str(self.folder / "ranges.json")
        path = self.folder / "quantised.onnx"
        try:
            with _quiet():
                library.quantize_static(
                    copy, str(path), reader,
                    quant_format=library.QuantFormat.QDQ,
                    activation_type=library.QuantType.QUInt8, weight_type=library.QuantType.QInt8,
                    per_channel=True, reduce_range=saturates(),
                    op_types_to_quantize=[*WEIGHTED, *_PASSING], nodes_to_quantize=sorted(names),
                    **more,
                )  # fmt: skip
            written = onnx.load(str(path))
        except Exception as error:  # the library raises whatever its parts raise
            raise OptionError(
                f"precision 'int8': onnxruntime.quantization cannot quantise this model: {one_line(error)}"
            ) from error
        return self._restored(written)

    def _restored(self, written: onnx.ModelProto) -> bytes:
        """The model with the original's names of nodes and of its producer, serialised."""
        restore(written, self._names)
        written.producer_name, written.producer_version = (
            self.model.producer_name,
            self.model.producer_version,
        )
        del written.metadata_props[:]
        written.metadata_props.extend(self.model.metadata_props)
        serialised: bytes = written.SerializeToString()
        return serialised


@dataclass(slots=True)
class Selection:
    """Selects the layers of a model that are quantised.

    `original`: the model that it is compared with, as the runtime loads it. `bound`: the greatest `Deviation.rms` on
    the checking sets. `until`: when the selection must be done (time.monotonic).
    """

    quantiser: Quantiser
    original: str | bytes
    bound: float
    until: float
    threads: int
    say: Callable[[int, int, str], None]
    measuring: bool = True  # False: nothing is timed, and all layers count as equal gains
    _expected: dict[bool, Outputs] = field(default_factory=dict, init=False)
    _seconds: float = field(default=0.0, init=False)  # to quantise all layers and to measure the error

    def run(self) -> Quantised | str:
        """The fastest quantised model within the bound, or why there is none.

        First all layers are quantised. Then the gain of each group is measured: how much slower a run is without it. If
        all groups with a gain exceed the bound together, the error of each is measured, and a part is selected.
        Raises OptionError if the library fails, BackendError if the original does not run.
        """
        layers = self.quantiser.layers
        if not layers:
            return "no Conv, Gemm or MatMul has constant weights in float32"
        self.say(0, 0, f"{len(layers)} layers")
        self._expect()
        self.quantiser.quantised(layers)  # takes ranges, which later calls need not do
        begin = time.monotonic()
        everything = self.quantiser.quantised(layers)
        first = self._checked(everything, layers)
        self._seconds = time.monotonic() - begin
        groups = self._timed(self._groups(layers), everything)
        useful = [group for group in groups if group.gain > 0.0]
        if not useful:
            return "no layer is faster in 8 bits"
        found = first if len(useful) == len(groups) else self._quantised(useful)
        if found.error.rms <= _MARGIN * self.bound:
            return found
        if time.monotonic() > self.until:
            return (
                f"the error of all layers is {found.error.rms:.3g}, above the bound of {self.bound:g}, and there was "
                "no time to select some of them (--time-limit)"
            )
        return self._within(useful, found)

    def _expect(self) -> None:
        sets = self.quantiser.sets
        self._expected = {
            True: run_all(self.original, sets.checking, threads=self.threads),
            False: run_all(self.original, sets.calibrating[:4], threads=self.threads),
        }

    def _error(self, model: bytes, checking: bool = True) -> Deviation:
        """The error on the checking or the calibrating sets."""
        sets = self.quantiser.sets
        try:
            found = run_all(model, sets.checking if checking else sets.calibrating[:4], threads=self.threads)
        except BackendError as error:
            raise OptionError(f"precision 'int8': the quantised model does not run: {error}") from error
        return deviation(self._expected[checking], found)

    def _checked(self, model: bytes, layers: Sequence[Layer]) -> Quantised:
        return Quantised(model, tuple(layers), self._error(model))

    def _quantised(self, groups: Sequence[Group]) -> Quantised:
        layers = [layer for group in groups for layer in group.layers]
        return self._checked(self.quantiser.quantised(layers), layers)

    def _groups(self, layers: Sequence[Layer]) -> list[Group]:
        """As many groups of neighbouring layers as there is time for: each is measured twice (its gain and its error),
        and some selections are checked.
        """
        left = self.until - time.monotonic() - 3 * self._seconds
        count = max(1, min(len(layers), int(left / (2 * self._seconds + _TIMING))))
        bounds = np.linspace(0, len(layers), count + 1).round().astype(int)
        return [Group(tuple(layers[a:b])) for a, b in itertools.pairwise(bounds)]

    def _timed(self, groups: Sequence[Group], everything: bytes) -> list[Group]:
        """The groups with their gains. A single group gains what the quantised model gains over the original."""
        if not self.measuring:
            return [Group(group.layers, float(len(group.layers))) for group in groups]
        timed = []
        for done, group in enumerate(groups):
            self.say(done, len(groups), "gains")
            rest = [layer for other in groups if other is not group for layer in other.layers]
            without = self.quantiser.quantised(rest) if rest else self.original
            compared = measure(
                [everything, without], self.quantiser.sets.whole, threads=self.threads, time_limit=_TIMING,
                control=False,
            )  # fmt: skip
            slower = 1.0 / compared.speedup.median - 1.0
            timed.append(Group(group.layers, slower * compared.latencies[0].seconds))
        return timed

    def _within(self, groups: Sequence[Group], together: Quantised) -> Quantised | str:
        """The selection of groups that keeps within the bound on the checking sets. If there is none, groups are halved
        and measured again, while there is time.
        """
        least = together.error.rms
        while True:
            begin, count = time.monotonic(), sum(group.error == 0.0 for group in groups)
            measured = [self._measured(group, done, len(groups)) for done, group in enumerate(groups)]
            seconds = (time.monotonic() - begin) / max(count, 1)
            for found in self._selections(measured, together):
                least = min(least, found.error.rms)
                if found.error.rms <= _MARGIN * self.bound:
                    return found
            groups = [half for group in measured for half in group.halves()]
            unknown = sum(group.error == 0.0 for group in groups)
            if groups == measured or time.monotonic() + (unknown + 1) * seconds > self.until:
                within = f"keep within the bound of {self.bound:g}"
                if math.isinf(least):
                    return (
                        f"no layers were found that {within}: an output is NaN or infinite on a set of inputs"
                    )
                return f"no layers were found that {within}: the least error was {least:.3g}"

    def _measured(self, group: Group, done: int, total: int) -> Group:
        """The group with its error."""
        if group.error:
            return group
        self.say(done, total, "errors")
        error = self._error(self.quantiser.quantised(group.layers), checking=False)
        return replace(group, error=error.rms)

    def _selections(self, measured: Sequence[Group], found: Quantised) -> Iterator[Quantised]:
        """Ever smaller selections of the groups, which together are `found`."""
        budget, before = _MARGIN * self.bound, tuple(measured)
        for _ in range(_SELECTIONS):
            chosen = select(measured, budget)
            if not chosen or time.monotonic() > self.until + _LATE:
                return
            if chosen != before:
                found, before = self._quantised(chosen), chosen
                yield found
            # The next budget is less by as much as the measured error exceeds the bound.
            summed = math.sqrt(math.fsum(group.error**2 for group in chosen))
            budget = min(budget, summed) * min(_SHRINK, _MARGIN * self.bound / found.error.rms)


def _library() -> Any:
    """onnxruntime.quantization. Raises OptionError if a package is missing that it imports."""
    try:
        return importlib.import_module("onnxruntime.quantization")
    except ImportError as error:
        raise OptionError(
            f"precision 'int8' needs {error.name or 'a package'}, which onnxruntime.quantization imports: install it"
        ) from error


def _reader(library: Any, sets: Sequence[Any]) -> Any:
    class Reader(library.CalibrationDataReader):  # type: ignore[misc]  # the package has no types
        """The sets of inputs, one after the other, then None."""

        def __init__(self) -> None:
            self.left: Iterator[Any] = iter(sets)

        def get_next(self) -> Any:
            return next(self.left, None)

    return Reader()


def _with_own_weights(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy of the model in which each node of these names has weights of its own.

    The library quantises a tensor for all of its readers, and would change layers that were not selected.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    readers = Counter(name for node in protos.all_nodes(copy.graph) for name in node.input)
    taken, tensors = protos.all_names(copy.graph), {t.name: t for t in copy.graph.initializer}
    readers.update(value.name for value in copy.graph.output)
    for node in copy.graph.node:
        for at, name in enumerate(node.input):
            if node.name in names and name in tensors and readers[name] > 1:
                own = f"{name}_{at}_of_{node.name}"
                while own in taken:
                    own += "_"
                taken.add(own)
                tensor = copy.graph.initializer.add()
                tensor.CopyFrom(tensors[name])
                tensor.name = node.input[at] = own
                readers[name] -= 1
    return copy


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's advice, which goes to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
