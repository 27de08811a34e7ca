"""Measures generated kernels of single operators, for cost models.

Each operator is compiled as a region of its own, all of them into one library, and runs in a session of its own. The
library records how long each kernel took. In a network with convolutions, images have channels last between kernels. So
for such a network, the region of an operator reads and returns images with channels last. It contains a conversion
between layouts only if the operator needs one in the network, too.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from xrlflow.backends.onnxruntime import Options, open_model, with_library
from xrlflow.backends.protocol import Array, BackendError
from xrlflow.backends.system_load import waited
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, Algorithms
from xrlflow.backends.tvm.library.code_generation import CompiledRegion, compile_region
from xrlflow.backends.tvm.library.hybrid import takes
from xrlflow.backends.tvm.library.kernel_library import kernel_library
from xrlflow.backends.tvm.lowering.value_types import types_of
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.onnxio.regions import whole_region

_IR_VERSION = 8
# Operators whose four-dimensional inputs are no images.
_NO_IMAGES = frozenset(
    {"Flatten", "Gather", "GatherND", "MatMul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_LAST, _FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_OWN_CODE = (
    *sorted(Path(__file__).parents[1].rglob("*.py")),
    *sorted((Path(__file__).parent / "native").iterdir()),
)
# The number of runs that fill caches and plan memory; the least and the greatest number of timed runs; and the seconds
# for all runs.
_WARM, _LEAST, _MOST, _SECONDS = 3, 5, 100, 0.02
# The greatest number of attempts to measure an operator. They end when our threads waited for a processor for at most
# the second number, a fraction of the time.
_ATTEMPTS, _QUIET = 3, 0.05

Operator: TypeAlias = tuple[bytes, Mapping[str, Array]]
"""A serialised model of one operator, with fixed sizes, and its inputs."""


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of each run. `waiting`: the fraction of the time, from 0 to 1, that our threads waited for a
    processor."""

    seconds: npt.NDArray[np.float64]
    waiting: float


def operator_times(
    operators: Sequence[Operator],
    machine: Machine,
    threads: int,
    *,
    channels_last: bool = False,
    algorithms: Algorithms = DEFAULT,
) -> list[Times | None]:
    """The times of these operators; None for operators that cannot be kernels.

    `algorithms`: as in `hybrid`. `channels_last`: whether images of the network have channels last. Raises BackendError
    if there is no C compiler, or if a kernel fails.
    """
    models = [onnx.load_from_string(model) for model, _ in operators]
    feeds = [{name: np.asarray(value) for name, value in inputs.items()} for _, inputs in operators]
    if channels_last:
        for proto, inputs in zip(models, feeds):
            _with_channels_last(proto, inputs)
    compiled = [_compiled(model, machine, channels_last, algorithms) for model in models]
    regions = {f"Operator_{i}": region for i, region in enumerate(compiled) if region is not None}
    if not regions:
        return [None] * len(operators)
    library = kernel_library(regions, machine)
    total = max(1, sum(len(region.plan.calls) for region in regions.values()))
    times: list[Times | None] = [None] * len(operators)
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder, ExitStack() as at_end:
        path = Path(folder) / "operators.so"
        library.save(path, profiled=total)
        opened_library = ctypes.CDLL(str(path))
        at_end.callback(_ctypes.dlclose, opened_library._handle)
        spent = (ctypes.c_int64 * total).in_dll(opened_library, "xrlflow_spent")
        begin = 0
        for index, region in enumerate(compiled):
            if region is None:
                continue
            model = _model(f"Operator_{index}", region, library.domain)
            with open_model(model, threads=threads, session_options=_options(path)) as opened:
                end = begin + len(region.plan.calls)
                times[index] = _quietest(
                    opened.bound_caller(feeds[index]), functools.partial(_sum, spent, begin, end)
                )
            begin = end
    return times


def _sum(spent: Any, begin: int, end: int) -> int:
    return sum(spent[begin:end])


def _quietest(run: Callable[[], object], spent: Callable[[], int]) -> Times:
    """The times of the first undisturbed attempt; if all attempts are disturbed, the times of the fastest. `spent`:
    returns the nanoseconds of the last run."""
    best: Times | None = None
    for _ in range(_ATTEMPTS):
        before, begin = waited(), time.perf_counter()
        nanoseconds: list[int] = []
        while len(nanoseconds) < _WARM + _LEAST or (
            len(nanoseconds) < _MOST and time.perf_counter() - begin < _SECONDS
        ):
            run()
            nanoseconds.append(spent())
        share = (waited() - before) / (time.perf_counter() - begin)
        times = Times(np.array(nanoseconds[_WARM:]) * 1e-9, max(0.0, share))
        if best is None or np.min(times.seconds) < np.min(best.seconds):
            best = times
        if times.waiting <= _QUIET:
            return times
    assert best is not None
    return best


def _options(library: Path) -> Options:
    """Session options for kernels as for operators of ONNX Runtime: threads spin between runs, as they do within a
    model."""
    return with_library({"session.force_spinning_stop": "0"}, str(library))


@functools.cache
def code_version() -> str:
    """The version of all code that generates kernels: TVM's version, and a digest of the sources of `backends.tvm`."""
    digest = hashlib.blake2b(digest_size=6)
    for path in _OWN_CODE:
        digest.update(path.read_bytes())
    return f"kernels of tvm {tvm().__version__} {digest.hexdigest()}"


def _compiled(
    model: ModelProto,
    machine: Machine,
    channels_last: bool,
    algorithms: Algorithms,
) -> CompiledRegion | None:
    types = types_of(model, {})
    if not takes(model, types):
        return None
    try:
        whole = whole_region(model.graph)
        return compile_region(
            model, whole, types, machine, channels_last=channels_last, algorithms=algorithms
        )
    except BackendError:  # in a network, too, ONNX Runtime would compute this operator
        return None


def _with_channels_last(model: ModelProto, feeds: dict[str, Array]) -> None:
    """Let the operator of a model take and return images with channels last, by transpositions around it."""
    graph = model.graph
    node = NodeProto()
    node.CopyFrom(graph.node[0])
    if node.op_type in _NO_IMAGES:
        return
    transpositions: list[NodeProto] = []
    for value in graph.input:
        if len(value.type.tensor_type.shape.dim) == len(_LAST):
            outside = f"{value.name}.last"
            inside = f"{value.name}.first"
            node.input[:] = [inside if name == value.name else name for name in node.input]
            transpositions.append(helper.make_node("Transpose", [outside], [inside], perm=_FIRST))
            feeds[outside] = np.ascontiguousarray(feeds.pop(value.name).transpose(_LAST))
            _move_channels(value, outside)
    del graph.node[:]
    graph.node.extend([*transpositions, node])
    for value in graph.output:
        if len(value.type.tensor_type.shape.dim) == len(_LAST):
            outside = f"{value.name}.last"
            graph.node.append(helper.make_node("Transpose", [value.name], [outside], perm=_LAST))
            _move_channels(value, outside)


def _move_channels(value: ValueInfoProto, name: str) -> None:
    """Rename an image, and change its declared shape to channels last."""
    value.name = name
    dims = value.type.tensor_type.shape.dim
    sizes = [dims[axis].dim_value for axis in _LAST]
    for dim, size in zip(dims, sizes):
        dim.dim_value = size


def _model(name: str, region: CompiledRegion, domain: str) -> bytes:
    """A model that calls a region."""

    def values(names: Sequence[str], numbers: Sequence[int]) -> list[ValueInfoProto]:
        tensors = [region.plan.tensors[number] for number in numbers]
        return [
            helper.make_tensor_value_info(
                port, helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)), tensor.shape
            )
            for port, tensor in zip(names, tensors)
        ]

    node = helper.make_node(name, list(region.inputs), list(region.outputs), domain=domain)
    inputs, outputs = values(region.inputs, region.plan.inputs), values(region.outputs, region.plan.outputs)
    graph = helper.make_graph([node], "operator", inputs, outputs)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    serialized: bytes = helper.make_model(
        graph, opset_imports=imports, ir_version=_IR_VERSION
    ).SerializeToString()
    return serialized
