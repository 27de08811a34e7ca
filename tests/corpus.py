"""ONNX's own backend tests as a corpus: single operators, small models, and what PyTorch exported in 2017."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from xrlflow.backends import BackendError
from xrlflow.verify.compare import by_deviation, is_float, judge_exact, judge_floats
from xrlflow.verify.runner import opened

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


def backend_tests(*kinds: str) -> tuple[Any, ...]:
    """ONNX's test cases of these kinds, in a fixed order. Loading them takes 5 seconds, once in a process."""
    return tuple(case for kind in kinds for case in _of_kind(kind))


@cache
def _of_kind(kind: str) -> list[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return sorted(load_model_tests(kind=kind), key=_folder)


def _folder(case: Any) -> str:
    """What orders cases that are files: a file system lists them in any order. The others keep theirs."""
    return case.name if case.model is None else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A model of the corpus. `feeds`: arrays, lists or None by input, without initialisers."""

    name: str
    proto: onnx.ModelProto
    feeds: dict[str, Any]

    @property
    def opset(self) -> int:
        return max((o.version for o in self.proto.opset_import if o.domain in ("", "ai.onnx")), default=1)


def sample(case: Any) -> Sample:
    """The model of a case, and the values of its inputs."""
    if case.model is not None:
        proto, values = (
            case.model,
            [
                numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v
                for v in case.data_sets[0][0]
            ],
        )
    else:
        folder = Path(case.model_dir)
        proto = onnx.load(folder / "model.onnx")
        first = folder / "test_data_set_0"
        files = [first / f"input_{index}.pb" for index in range(len(list(first.glob("input_*.pb"))))]
        values = [_value(file.read_bytes(), port.type) for file, port in zip(files, proto.graph.input)]
    constants = {t.name for t in proto.graph.initializer}
    names = [port.name for port in proto.graph.input if port.name not in constants]
    return Sample(case.name, proto, dict(zip(names, values)))


def _value(data: bytes, type: onnx.TypeProto) -> Any:
    if type.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if type.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def outputs(model: bytes, feeds: dict[str, Any]) -> list[Any] | None:
    """The outputs of a model in ONNX Runtime; None if it does not run it."""
    try:
        with opened(model, threads=1) as runner:
            return runner.run(feeds)
    except BackendError:
        return None


def same(a: Any, b: Any) -> bool:
    """Whether two outputs, or lists of outputs, are equal up to rounding, with equal types and shapes."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if a is None or b is None:
        return a is b
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return (judge_floats(by_deviation(x, None), y) if is_float(x) else judge_exact(x, y)).passed
