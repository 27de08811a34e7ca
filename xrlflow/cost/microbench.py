"""Single operators measured in ONNX Runtime, as TASO does (section 5 of the paper).

Constants become initialisers, so that the runtime packs weights in advance as it does in the full model. A model of one
operator has two costs that the operator does not have in its network. They are subtracted: the call of the session
(`call_seconds`: a model that does almost nothing) and, for convolutions, the conversion to the blocked layout and back
(the runtime's profile tells the kernel's share).
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.interleave import time_alone
from xrlflow.backends.limits import available_memory
from xrlflow.backends.onnxruntime.session import OrtModel, open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.system_load import waited
from xrlflow.ir import ABSENT, NO_ATTRS, DType, Node, TensorType, Value
from xrlflow.ops.subgraph import NotStandalone, input_name, model_of, numpy_type
from xrlflow.ops.work import dimensions, number_of

Array = npt.NDArray[Any]

# Operators whose integer inputs are indices into their first input.
_INDEXED = frozenset(
    ["Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND", "TensorScatter"]
)
# Operators that fail if the input of this number has an integer that is 0.
_POSITIVE = {"Div": 1, "Mod": 1, "OneHot": 1, "Range": 2}
# The most dimensions of NumPy's arrays, and bytes of memory that every machine has.
_MOST_DIMENSIONS, _LARGE = 64, 1 << 30
# Only one session runs during a measurement, so its threads may spin between runs, as they do within a model.
_SPIN = {"session.force_spinning_stop": "0"}


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call, measured several times."""

    median: float
    low: float  # the 10th percentile
    high: float  # the 90th percentile
    count: int  # of calls
    waiting: float = 0.0
    """The share of time that our threads waited for a processor: above QUIET, other programs used the processors."""


def is_bound(types: Sequence[TensorType | None], bindings: Mapping[str, int]) -> bool:
    """Whether every dimension is a number, or a symbol that `bindings` gives a number."""
    return all(
        t is None or (t.shape is not None and all(number_of(d, bindings) is not None for d in t.shape))
        for t in types
    )


# The input that is the shape of the result.
_SHAPE = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}


def sample_inputs(
    node: Node,
    in_types: Sequence[TensorType | None],
    constants: Mapping[Value, Array],
    bindings: Mapping[str, int],
) -> tuple[dict[Value, Array], dict[Value, Array]]:
    """The arrays that a node reads, by value: (inputs to feed, constants to build into the model).

    `constants`: the constants whose values matter to the time (shapes, axes, scalars). A shape that the model computes
    is that of the result. All other arrays are random: floats around 0, integers that are valid indices, and no
    divisor, depth or step that is 0. Raises NotStandalone for element types that NumPy lacks, and for arrays that do
    not fit into half of the free memory.
    """
    draw = np.random.default_rng(0)
    shapes = [() if t is None else dimensions(t, bindings) for t in in_types]
    _check_size(node, [*shapes, *(dimensions(t, bindings) for t in node.types)])
    bound = min((d for d in shapes[0] if d > 0), default=1) if shapes and node.op in _INDEXED else 2
    inputs: dict[Value, Array] = {}
    consts: dict[Value, Array] = {}
    for slot, (value, type, shape) in enumerate(zip(node.inputs, in_types, shapes)):
        if type is None or value == ABSENT:
            continue
        array = constants.get(value) if type.const else None
        if array is None and slot == _SHAPE.get(node.op) and type.dtype == DType.INT64:
            array = np.array(dimensions(node.types[0], bindings)[-shape[0] :] if shape[0] else (), np.int64)
        if array is None:
            minimum = 1 if _POSITIVE.get(node.op) == slot else 0
            array = _random(draw, type.dtype, shape, minimum, minimum + bound)
        (consts if type.const else inputs)[value] = array
    return inputs, consts


def _check_size(node: Node, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise NotStandalone for tensors that cannot be allocated here. `shapes`: of a node's inputs and outputs."""
    size = 8 * sum(map(math.prod, shapes))
    if max(map(len, shapes), default=0) > _MOST_DIMENSIONS:
        raise NotStandalone(f"{node.op} has a tensor of more than {_MOST_DIMENSIONS} dimensions")
    if size > _LARGE and size > available_memory() // 2:
        raise NotStandalone(f"{node.op} needs {size >> 30} GB")


def _random(
    draw: np.random.Generator, dtype: DType, shape: tuple[int, ...], minimum: int, bound: int
) -> Array:
    # NumPy draws no array of rank 0 but a number, which ONNX Runtime does not take.
    return np.asarray(_sample_array(draw, numpy_type(dtype), shape, minimum, bound))


def _sample_array(
    draw: np.random.Generator, numpy: np.dtype[Any], shape: tuple[int, ...], minimum: int, bound: int
) -> Array:
    if numpy.kind == "f":
        return (draw.standard_normal(shape, dtype=np.float32) * np.float32(0.1)).astype(numpy)
    if numpy.kind == "b":
        return draw.integers(0, 2, shape).astype(numpy)
    if numpy.itemsize == 1:  # quantised values
        return draw.integers(minimum, 128, shape).astype(numpy)
    return draw.integers(minimum, bound, shape).astype(numpy)


def time_node(
    node: Node,
    in_types: Sequence[TensorType | None],
    constants: Mapping[Value, Array],
    *,
    threads: int,
    time_limit: float = 0.03,
    bindings: Mapping[str, int] | None = None,
    kernel_only: bool = False,
) -> Sample:
    """Seconds of one call of a session with only this node, or, with `kernel_only`, of its kernel.

    Raises NotStandalone if the node cannot be a model of its own or its outputs have unexpected shapes, and
    BackendError if the runtime refuses it.
    """
    bindings = bindings or {}
    inputs, consts = sample_inputs(node, in_types, constants, bindings)
    types = {v: TensorType(_dtype(node, in_types, v), a.shape) for v, a in inputs.items()}
    outputs = [v for v, t in zip(node.outputs, node.types) if t.dtype != DType.UNDEFINED]
    model = model_of([node], types, consts, outputs)
    feeds = {input_name(v): a for v, a in inputs.items()}
    expected = [dimensions(t, bindings) for t in node.types if t.dtype != DType.UNDEFINED]
    exact = is_bound(node.types, bindings)
    if kernel_only:
        with _profiling(model, threads) as (opened, events):
            _check(opened, feeds, expected if exact else None, node)
            with _waiting_share() as share:
                _run_for(opened, feeds, time_limit)
        return _kernel_sample(events, node, share[0])
    with open_model(model, threads=threads, session_options=_SPIN) as opened:
        _check(opened, feeds, expected if exact else None, node)
        return _time(opened.bound_caller(feeds), time_limit)


def time_nodes(
    nodes: Sequence[Node], feeds: Mapping[Value, Array], consts: Mapping[Value, Array], *, threads: int
) -> Sample:
    """Seconds of one call of a session with these float32 nodes. The last node gives the output."""
    types = {v: TensorType(DType.FLOAT, a.shape) for v, a in feeds.items()}
    model = model_of(nodes, types, consts, nodes[-1].outputs)
    with open_model(model, threads=threads, session_options=_SPIN) as opened:
        return _time(opened.bound_caller({input_name(v): a for v, a in feeds.items()}), 0.05)


def _time(run: Callable[[], object], time_limit: float) -> Sample:
    with _waiting_share() as share:
        latency = time_alone(run, time_limit=time_limit)
    return Sample(
        latency.median_ms / 1e3, latency.p10_ms / 1e3, latency.p90_ms / 1e3, latency.samples, share[0]
    )


@contextlib.contextmanager
def _waiting_share() -> Iterator[list[float]]:
    """A list that gets one number when the block ends: the share of the time for which our threads waited for a
    processor."""
    share = [0.0]
    before, start = waited(), time.perf_counter()
    yield share
    share[0] = max(0.0, waited() - before) / max(time.perf_counter() - start, 1e-9)


QUIET = 0.05  # the largest `Sample.waiting` on a quiet machine
_ATTEMPTS = 3


def in_quiet(once: Callable[[], Sample], tolerance: float = QUIET) -> tuple[Sample, bool]:
    """A sample, and whether it was measured on a quiet machine: the first such sample, or else the best of three.

    If none was quiet, the sample's median is replaced by its 10th percentile: under load the fastest calls are closer
    to the truth.
    """
    samples: list[Sample] = []
    for _ in range(_ATTEMPTS):
        samples.append(once())
        if samples[-1].waiting <= tolerance:
            return samples[-1], True
    best = min(samples, key=lambda s: s.low)
    return replace(best, median=best.low), False


def call_seconds(threads: int) -> Sample:
    """Seconds to call a session that computes the sine of one number."""
    node = Node("Sin", (Value(1),), (Value(2),), (TensorType(DType.FLOAT, (1,)),), NO_ATTRS)
    return time_nodes([node], {Value(1): np.zeros(1, np.float32)}, {}, threads=threads)


def _dtype(node: Node, in_types: Sequence[TensorType | None], value: Value) -> DType:
    type = in_types[node.inputs.index(value)]
    if type is None:
        raise NotStandalone(f"{node.op}: an input without a type")
    return type.dtype


def _check(
    opened: OrtModel, feeds: Mapping[str, Array], expected: list[tuple[int, ...]] | None, node: Node
) -> None:
    outputs = opened.run(feeds)
    if expected is not None and [np.shape(o) for o in outputs] != expected:
        raise NotStandalone(f"{node.op} alone gives {[np.shape(o) for o in outputs]} and not {expected}")


@contextlib.contextmanager
def _profiling(model: bytes, threads: int) -> Iterator[tuple[OrtModel, list[dict[str, Any]]]]:
    """A session that records the times of its kernels. The list is filled when the block ends."""
    import onnxruntime as ort

    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        for key, value in _SPIN.items():
            options.add_session_config_entry(key, value)
        with open_model(model, threads=threads, session_options=options) as opened:
            yield opened, events
            profile = Path(opened.session.end_profiling())
        events.extend(json.loads(profile.read_text()))


def _run_for(opened: OrtModel, feeds: Mapping[str, Array], time_limit: float) -> None:
    run = opened.bound_caller(feeds)
    run()
    stop = time.perf_counter() + time_limit
    for count in range(200):
        if count >= 5 and time.perf_counter() > stop:
            break
        run()


def _kernel_sample(events: Sequence[Mapping[str, Any]], node: Node, waiting: float) -> Sample:
    """The time of all kernels of each run together, without layout conversions, from a profile in microseconds."""
    runs: dict[str, list[float]] = {}
    for event in events:
        name = str(event.get("name", ""))
        operator = str(event.get("args", {}).get("op_name", ""))
        if (
            name.endswith("_kernel_time")
            and event.get("cat") == "Node"
            and not operator.startswith("Reorder")
        ):
            runs.setdefault(name, []).append(float(event["dur"]) * 1e-6)
    if not runs:
        raise BackendError(f"ONNX Runtime's profile has no kernel of {node.op}")
    totals = np.sort(np.sum([row[2:] for row in runs.values()], axis=0))
    # The mean of the middle half is finer than the profile's clock.
    quarter = len(totals) // 4
    middle = totals[quarter : len(totals) - quarter]
    low, high = np.percentile(totals, [10, 90])
    return Sample(float(np.mean(middle)), float(low), float(high), len(totals), waiting)
