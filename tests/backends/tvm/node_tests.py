"""ONNX's node tests through TVM: `python -m tests.backends.tvm.node_tests [OPERATORS]`.

Each model whose operators can be lowered is compiled twice: unchanged, and with all inputs but the first as constants,
because many operators are lowered only with constant axes, sizes or indices.

A case is "right" if the results are those that the test expects, "refused" if there is an error with a reason, "like
ONNX Runtime" if ONNX Runtime differs from the test in the same way, and otherwise "wrong". The program prints the
number of each and the wrong cases, and exits with code 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from tests.corpus import backend_tests
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import unsupported

_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """A node test: a model, its inputs by name, and the expected outputs."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Any]
    expected: tuple[Any, ...]
    tolerance: tuple[float, float]

    @property
    def operator(self) -> str:
        return str(self.model.graph.node[0].op_type)


def cases() -> Iterator[Case]:
    """The node tests on tensors whose operators can be lowered, each with inputs and with constants."""
    for test in backend_tests("node"):
        if test.model is None or unsupported([(n.domain, n.op_type) for n in test.model.graph.node]):
            continue
        values = (*test.model.graph.input, *test.model.graph.output)
        if not all(value.type.HasField("tensor_type") for value in values):
            continue
        given, expected = ([_array(value) for value in part] for part in test.data_sets[0])
        feeds = dict(zip((value.name for value in test.model.graph.input), given))
        case = Case(test.name, test.model, feeds, tuple(expected), (test.rtol, max(test.atol, _ROUNDING)))
        yield case
        if len(feeds) > 1 and not test.model.graph.initializer:
            yield _with_constants(case)


def _array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _with_constants(case: Case) -> Case:
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    first, *others = case.feeds
    model.graph.initializer.extend(onnx.numpy_helper.from_array(case.feeds[name], name) for name in others)
    kept = [value for value in model.graph.input if value.name == first]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    feeds = {first: case.feeds[first]}
    return Case(f"{case.name} with constants", model, feeds, case.expected, case.tolerance)


def trouble(case: Case, results: Sequence[Any]) -> str | None:
    """How the results differ from the expected ones; None if they do not."""
    for output, result, expected in zip(case.model.graph.output, results, case.expected):
        if result.dtype != expected.dtype or result.shape != expected.shape:
            return f"{output.name} is {result.dtype}{list(result.shape)}, not {expected.dtype}{list(expected.shape)}"
        exact = expected.dtype.kind in "biu" or expected.size == 0
        a, b = (x if exact else x.astype(np.complex128) for x in (result, expected))
        rtol, atol = case.tolerance
        same = np.array_equal(a, b) if exact else np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if not same:
            return f"{output.name} is {result.reshape(-1)[:4]}, not {expected.reshape(-1)[:4]}"
    return None


def outcome(case: Case) -> tuple[str, str]:
    """The outcome (right, refused, like ONNX Runtime or wrong), and its reason."""
    try:
        with compiled(case.model, detect(cores=1), threads=1) as model:
            results = model.run(case.feeds)
    except BackendError as error:
        return "refused", str(error)
    if (result := trouble(case, results)) is None:
        return "right", ""
    try:
        with open_model(case.model.SerializeToString(), threads=1) as runtime:
            today = replace(case, expected=tuple(runtime.run(case.feeds)))
    except BackendError:  # it lacks the operator
        return "wrong", result
    return ("like ONNX Runtime" if trouble(today, results) is None else "wrong"), result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATORS", help="only these (default: all)")
    wanted = set(parser.parse_args().operators)
    counts: Counter[str] = Counter()
    operators: dict[str, set[str]] = {}
    for case in cases():
        if wanted and case.operator not in wanted:
            continue
        result, reason = outcome(case)
        counts[result] += 1
        operators.setdefault(result, set()).add(case.operator)
        if result == "wrong" or wanted:
            print(f"{case.name}: {result}{reason and ': '}{reason}", flush=True)
    for result, count in counts.most_common():
        print(f"{count} {result}, of {len(operators[result])} operators")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
