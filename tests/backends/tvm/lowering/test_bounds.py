"""Indices outside of their tables raise an error that names them, as in ONNX Runtime, and never read foreign memory."""

from __future__ import annotations

import dataclasses
import io
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import tests.backends.tvm.lowering.bounded
from tests.corpus import backend_tests
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Tvm, detect
from xrlflow.backends.tvm.fusion.checks import Check
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.open_sizes import sized
from xrlflow.backends.tvm.kernels.legalize import legalizations
from xrlflow.backends.tvm.lowering.importer import import_model, unsupported
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

pytestmark = pytest.mark.measures

MIN64, MIN32 = np.iinfo(np.int64).min, np.iinfo(np.int32).min


def parsed(signature: str, body: str, opset: int = 20) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}]> agraph {signature} {{ {body} }}'
    )


# One model contains all operators that compute addresses from data. To compile one operator alone takes as long as all
# of them.
MODEL = parsed(
    "(float[3,4] x, int64[2] rows, int32[2] columns, int64 one, int64[2,3] cells, int32[2,4] cells32,"
    " int64[2,2] places, int64[3,1] batched, int64[3,2] into, float[3,2] u, int32[1,4] onto, float[1,4] v,"
    " int64[2,1] spots, float[2,4] w, float[1,1,2,2] pooled, int64[1,1,2,2] pixels, float[2,1,3,4] images,"
    " float[1,4] region, int64[1] image, float[1,5] regions, int64[2] n, int64[2] by, int32[2] n32, int32[2] by32,"
    " float[2] c, float[2] d, float[2] e)"
    " => (float[2,4] gather, float[3,2] last, float[4] scalar, float[2,3] elements, float[2,4] elements32,"
    " float[2] nd, float[3] nd_batched, float[3,4] scattered, float[3,4] added, float[3,4] scattered_rows,"
    " float[1,1,4,4] unpooled, float[1,1,2,2] aligned, float[1,1,2,2] roi_pooled, int64[2] quotient, int32[2] rest,"
    " float[2,4] computed, float[2,4] computed32)",
    "gather = Gather(x, rows)\n last = Gather<axis=-1>(x, columns)\n scalar = Gather(x, one)\n"
    "elements = GatherElements<axis=1>(x, cells)\n elements32 = GatherElements<axis=0>(x, cells32)\n"
    "nd = GatherND(x, places)\n nd_batched = GatherND<batch_dims=1>(x, batched)\n"
    "scattered = ScatterElements<axis=1>(x, into, u)\n"
    'added = ScatterElements<axis=0, reduction="add">(x, onto, v)\n scattered_rows = ScatterND(x, spots, w)\n'
    "unpooled = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(pooled, pixels)\n"
    "aligned = RoiAlign<output_height=2, output_width=2, sampling_ratio=2>(images, region, image)\n"
    "roi_pooled = MaxRoiPool<pooled_shape=[2,2]>(images, regions)\n"
    "quotient = Div(n, by)\n rest = Mod(n32, by32)\n"
    "cd = Mul(c, d)\n as64 = Cast<to=7>(cd)\n computed = Gather(x, as64)\n"
    "as32 = Cast<to=6>(e)\n computed32 = Gather(x, as32)",
)
TABLES = {
    "rows": (3, "Gather gather"),
    "columns": (4, "Gather last"),
    "one": (3, "Gather scalar"),
    "cells": (4, "GatherElements elements"),
    "cells32": (3, "GatherElements elements32"),
    "places": (4, "GatherND nd"),
    "batched": (4, "GatherND nd_batched"),
    "into": (4, "ScatterElements scattered"),
    "onto": (3, "ScatterElements added"),
    "spots": (3, "ScatterND scattered_rows"),
}
"""For each input that is an index: the extent of its table, and its node."""


def arrays() -> dict[str, Any]:
    """Inputs whose indices are all inside their tables."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(
            np.float32
        )
        for value in MODEL.graph.input
    }
    return feeds | {
        "rows": np.array([0, 2]),
        "columns": np.array([3, 0], np.int32),
        "one": np.array(1),
        "cells": np.array([[0, 1, 2], [3, 2, 1]]),
        "cells32": np.array([[0, 1, 2, 0], [2, 2, 1, 0]], np.int32),
        "places": np.array([[0, 1], [2, 3]]),
        "batched": np.array([[0], [3], [1]]),
        "into": np.array([[0, 1], [2, 3], [0, 2]]),
        "onto": np.array([[0, 1, 2, 0]], np.int32),
        "spots": np.array([[0], [1]]),
        "pixels": np.array([[[[0, 7], [8, 15]]]]),
        "region": np.array([[0.5, 0, 2, 2.5]], np.float32),
        "image": np.array([1]),
        "regions": np.array([[1, 0, 0, 2, 2]], np.float32),
        "n": np.array([7, -9]),
        "by": np.array([2, 4]),
        "n32": np.array([7, -9], np.int32),
        "by32": np.array([-4, 4], np.int32),
        "c": np.array([1, 0.5], np.float32),
        "d": np.array([2, -2.5], np.float32),
        "e": np.array([-3, 2.9], np.float32),
    }


def changed(name: str, value: Any) -> dict[str, Any]:
    """The inputs, with another last element of the input `name`."""
    feeds = arrays()
    array = feeds[name].copy()
    array[(-1,) * array.ndim] = value
    return feeds | {name: array}


def far(name: str) -> list[int]:
    return [MIN32, 1 << 30] if arrays()[name].dtype == np.int32 else [MIN64, 1 << 40]


INSIDE = {
    f"{name} {value}": changed(name, value) for name, (n, _) in TABLES.items() for value in (-1, -n, n - 1)
} | {
    "pixels": changed("pixels", 14),
    "image": changed("image", 0),
    "regions": arrays() | {"regions": np.array([[-0.5, 0, 0, 3, 3]], np.float32)},
    "by": changed("by", -1),
    "c": changed("c", 1.19),
    "e": changed("e", -1.0),
}
OUTSIDE = {
    f"{name} {value}": (changed(name, value), (f"{node}: index {value} (input {name}) ", f"-{n} to {n - 1}"))
    for name, (n, node) in TABLES.items()
    for value in (-n - 1, n, *far(name))
} | {
    f"{name} {value}": (feeds, (said,))
    for name, value, feeds, said in (
        *(
            ("pixels", v, changed("pixels", v), f"MaxUnpool unpooled: index {v} (input pixels) ")
            for v in (-1, 16, MIN64, 1 << 40)
        ),
        *(
            ("image", v, changed("image", v), f"RoiAlign aligned: index {v} (input image) ")
            for v in (-1, 2, MIN64, 1 << 40)
        ),
        *(
            (
                "regions", v, arrays() | {"regions": np.array([[v, 0, 0, 2, 2]], np.float32)},
                "MaxRoiPool roi_pooled: index ",
            )
            for v in (-1.0, 2.0, 1e30, np.nan)
        ),
        ("region", np.nan, changed("region", np.nan), "RoiAlign aligned: a region (input region) is not finite"),
        ("by", 0, changed("by", 0), "Div quotient: a divisor (input by) is zero"),
        ("by32", 0, changed("by32", 0), "Mod rest: a divisor (input by32) is zero"),
        *(
            ("c", v, changed("c", v), "Gather computed: index ")
            for v in (np.nan, -np.inf, np.inf, 1e30, -1e30, -1.2, 2.0)
        ),
        *(
            ("e", v, changed("e", v), "Gather computed32: index ")
            for v in (np.nan, -np.inf, np.inf, 1e30, 3e9, 3.0, -4.0)
        ),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bounds") / "model.so"
    Tvm().compile(MODEL.SerializeToString()).save(path)
    return path


@pytest.fixture(scope="module")
def answers(library: Path) -> Mapping[str, Any]:
    """The library's answers to the feeds above, in their order. It runs in a process of its own."""
    cases = {"first": arrays()} | INSIDE | {name: feeds for name, (feeds, _) in OUTSIDE.items()} | {
        "least": arrays() | {"n": np.array([MIN64, 8]), "by": np.array([-1, -1])},
        "afterwards": arrays(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", tests.backends.tvm.lowering.bounded.__name__],
        input=pickle.dumps((library, list(cases.values()))),
        stdout=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    result, stream = [], io.BytesIO(done.stdout)
    while stream.tell() < len(done.stdout):
        result.append(pickle.load(stream))
    return dict(zip(cases, result)) | dict.fromkeys(list(cases)[len(result) :], "the process has ended")


def test_indices_inside_of_their_tables(answers: Mapping[str, Any]) -> None:
    with open_model(MODEL.SerializeToString()) as runtime:
        for name, feeds in {"first": arrays(), **INSIDE, "afterwards": arrays()}.items():
            assert not isinstance(answers[name], str), (name, answers[name])
            for output, a, b in zip(runtime.output_names, runtime.run(feeds), answers[name], strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-7, err_msg=f"{name}: {output}")


@pytest.mark.parametrize("name", OUTSIDE)
def test_indices_outside_of_their_tables(name: str, answers: Mapping[str, Any]) -> None:
    feeds, said = OUTSIDE[name]
    with open_model(MODEL.SerializeToString()) as runtime, pytest.raises(BackendError):
        runtime.run(feeds)
    assert all(part in str(answers[name]) for part in said), answers[name]


def test_computed_indices_name_what_they_come_from(answers: Mapping[str, Any]) -> None:
    assert (
        answers["c 2.0"]
        == "Gather computed: index -5 (computed from inputs c, d) is outside of its table, which has -3 to 2"
    )
    assert "index 3 (computed from input e)" in answers["e 3.0"]
    assert "in dimension 1, which has -4 to 3" in answers["places 4"]


def test_the_least_number_by_minus_one(answers: Mapping[str, Any]) -> None:
    """The same division ends ONNX Runtime's process."""
    names = [value.name for value in MODEL.graph.output]
    np.testing.assert_array_equal(answers["least"][names.index("quotient")], [MIN64, -8])


def test_without_checks_kernels_stay_inside() -> None:
    """This is how TVM's runtime alone runs the library: it returns the extra output, and reads rows inside the table
    for any index."""
    model = parsed("(float[3,4] x, int64[5] rows) => (float[5,4] y)", "y = Gather(x, rows)")
    compiled = Tvm().compile(model.SerializeToString())
    compiled.interface = dataclasses.replace(compiled.interface, checks=())
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    result, ends = compiled.run({"x": x, "rows": np.array([-4, 1, 3, -1, 5])})
    np.testing.assert_array_equal(result, x[[0, 1, 2, 2, 2]])
    np.testing.assert_array_equal(ends, [[-4, 5]])


def test_a_model_without_indices_has_no_further_output() -> None:
    model = parsed("(float[3,4] x) => (float[3,4] y)", "y = Relu(x)")
    assert len(import_model(model)["main"].ret_ty.shape) == 2


CONSTANT = {
    "Gather y: index 5 (constant)": ("i = Constant<value = int64[2] {0,5}>()\n y = Gather(x, i)"),
    "Gather y: index -4 (constant)": ("i = Constant<value = int64 {-4}>()\n y = Gather(x, i)"),
    "GatherND y: index 4 (constant) is outside of its table in dimension 1": (
        "f = Constant<value = int64[2] {0,4}>()\n s = Constant<value = int64[2] {1,2}>()\n"
        "i = Reshape(f, s)\n y = GatherND(x, i)"
    ),
    "GatherElements y: indices of shape [4, 1] reach beyond a table of shape [3, 4]": (
        "i = Constant<value = int64[4,1] {0,0,0,0}>()\n y = GatherElements<axis=1>(x, i)"
    ),
    "ScatterND y: updates of shape [3, 4], not [1, 4]": (
        "i = Constant<value = int64[1,1] {0}>()\n y = ScatterND(x, i, x)"
    ),
    "TopK y: asked for the first 5 of 4": "k = Constant<value = int64[1] {5}>()\n y, i = TopK(x, k)",
    "Pad y: 3 reflected elements of 3": (
        'p = Constant<value = int64[4] {3,0,0,0}>()\n y = Pad<mode="reflect">(x, p)'
    ),
    "Div q: a divisor (constant) is zero": (
        "i = Cast<to=7>(x)\n z = Constant<value = int64 {0}>()\n q = Div(i, z)\n y = Cast<to=1>(q)"
    ),
}


@pytest.mark.parametrize("said", CONSTANT)
def test_constant_indices_are_looked_at_before_anything_is_compiled(
    said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = parsed("(float[3,4] x) => (float[n,m] y)", CONSTANT[said])
    with pytest.raises(BackendError) as error:
        Tvm().compile(model.SerializeToString())
    assert said in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("also", ["", "(x, k)"])
def test_indices_that_become_constant(also: str) -> None:
    """The passes after the importer fold more constants than the importer. The constant index is the only one, or
    beside an index that is an input."""
    more = "z = Gather(x, k)" if also else "z = Identity(x)"
    model = parsed(
        "(float[3,4] x, int64[3] k) => (float[4] y, float[3,4] z)",
        f"i = Constant<value = int64 {{2}}>()\n f = Cast<to=1>(i)\n s = Sqrt(f)\n t = Exp(s)\n j = Cast<to=7>(t)\n"
        f"y = Gather(x, j)\n {more}",
    )
    with pytest.raises(BackendError, match=r"Gather y: index 4 \(constant\) is outside"):
        Tvm().compile(model.SerializeToString())


BY_VALUES = {
    "Slice": "(float[3,4] x, int64[1] s, int64[1] e) => (float[n,4] y)|y = Slice(x, s, e)",
    "Slice of a known size": "(float[3,4] x, int64[1] s) => (float[2,4] y)|two = Constant<value = int64[1] {2}>()\n"
    " e = Add(s, two)\n y = Slice(x, s, e)",
    "Expand": "(float[1,4] x, int64[2] s) => (float[n,m] y)|y = Expand(x, s)",
    "Tile": "(float[3,4] x, int64[2] s) => (float[n,m] y)|y = Tile(x, s)",
    "Range": "(int64 a, int64 b, int64 c) => (int64[n] y)|y = Range(a, b, c)",
    "Reshape": "(float[3,4] x, int64[2] s) => (float[n,m] y)|y = Reshape(x, s)",
    "Pad": "(float[3,4] x, int64[4] s) => (float[n,m] y)|y = Pad(x, s)",
    "Compress": "(float[3,4] x, bool[3] s) => (float[n,4] y)|y = Compress<axis=0>(x, s)",
    "TopK": "(float[3,4] x, int64[1] s) => (float[3,n] y, int64[3,n] i)|y, i = TopK(x, s)",
    "Squeeze": "(float[1,4] x, int64[1] s) => (float[n] y)|y = Squeeze(x, s)",
    "NonMaxSuppression": "(float[1,4,4] x, float[1,1,4] s) => (int64[n,3] y)|m = Constant<value = int64 {3}>()\n"
    " y = NonMaxSuppression(x, s, m)",
    "Gather from what is found": "(float[3,4] x, int64[1] s) => (int64[2,1] y)|z = NonZero(x)\n"
    " y = Gather<axis=1>(z, s)",
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_sizes_that_depend_on_values_are_refused(name: str) -> None:
    signature, body = BY_VALUES[name].split("|")
    refused = "depends on values|must be a constant|Dynamic pads|requires the input new shape to be Shape"
    with pytest.raises(BackendError, match=refused):
        fuse(import_model(parsed(signature, body)), detect())


KNOWN = {"take", "gather", "te_gather_nd", "scatter", "scatter_nd", "roi_align", "grid_sample"}
"""Kernels that compute addresses from data.

The passes before move indices of the first five into their tables. The others compare coordinates with the borders of
the image, but not the number of the image.
"""


def test_no_other_kernels_take_addresses_from_data() -> None:
    """Up to three of ONNX's own tests of each operator are examined. If a new kernel is found, `bounds` needs a rule
    for it."""
    tvm()
    from tvm import relax, tirx
    from tvm.ir.expr import TensorLoad
    from tvm_ffi import structural_walk

    machine, tried, result = detect(), Counter[str](), set[str]()

    def look(name: str, access: Any) -> None:
        for index in access.indices:
            structural_walk(index, (TensorLoad, lambda _: result.add(name.rstrip("0123456789"))))

    for case in backend_tests("node"):
        graph = case.model.graph if case.model is not None else None
        if graph is None or len(graph.node) != 1 or unsupported([(n.domain, n.op_type) for n in graph.node]):
            continue
        operator = graph.node[0].op_type
        if tried[operator] == 3:
            continue
        try:
            module = import_model(case.model)
            with machine.target():
                module = sized(relax.transform.LegalizeOps(dict(legalizations(machine)))(module))
        except Exception:  # TVM's: what it refuses has no kernels
            continue
        tried[operator] += 1
        for variable, function in module.functions.items():
            if isinstance(function, tirx.PrimFunc):
                for kind in (TensorLoad, tirx.BufferStore):
                    structural_walk(function.body, (kind, lambda a, name=variable.name_hint: look(name, a)))
    assert sum(tried.values()) > 150
    assert result <= KNOWN
    assert {"take", "gather", "scatter_nd"} <= result


def test_what_a_check_says() -> None:
    check = Check(("before ", " after"), -3, 2)
    assert check.trouble(-3, 2) is None
    assert check.trouble(-4, 7) == "before -4 after"
    assert check.trouble(0, 3) == "before 3 after"
    assert Check(("alone",), 1, 1).trouble(0, 1) == "alone"


@pytest.fixture(scope="module")
def strict() -> Any:
    model = parsed(
        "(float[3,4] x, int64[2] i, bool[2] b, float16[0,2] e) => (float[2,4] y, bool[2] z, float16[0,2] w)",
        "y = Gather(x, i)\n z = Not(b)\n w = Identity(e)",
    )
    return Tvm().compile(model.SerializeToString())


X = np.arange(12, dtype=np.float32).reshape(3, 4)
GIVEN = {"x": X, "i": np.array([0, -1]), "b": np.array([True, False]), "e": np.zeros((0, 2), np.float16)}
ODD = np.zeros(49, np.uint8)[1:].view(np.float32).reshape(3, 4)
ODD[:] = X
FIXED = X.copy()
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    "x",
    [np.asfortranarray(X), np.repeat(X, 2, 0)[::2], X[::-1].copy()[::-1], FIXED, ODD, np.ma.array(X)],
    ids=["columns first", "strided", "backwards", "read-only", "unaligned", "masked"],
)
def test_arrays_of_every_layout(strict: Any, x: Any) -> None:
    y, z, w = strict.run({**GIVEN, "x": x})
    np.testing.assert_array_equal(y, X[[0, -1]])
    np.testing.assert_array_equal(z, [False, True])
    assert w.shape == (0, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", X[:2]), ("x", X.astype(np.float64)), ("x", X.astype(">f4")), ("x", X.astype(object)), ("x", None),
        ("x", np.float32(1)), ("x", X.tobytes()), ("x", X.view([("a", "<f4")])), ("x", X.astype(np.complex64)),
        ("i", np.array([0, 1], np.int32)), ("i", np.array([0, 1], np.uint64)), ("b", np.array([1, 0], np.uint8)),
        ("e", np.zeros((2, 0), np.float16)),
    ],
)  # fmt: skip
def test_arrays_of_other_sizes_and_types(strict: Any, name: str, value: Any) -> None:
    with pytest.raises(BackendError, match=f"^input {name} was compiled as "):
        strict.run({**GIVEN, name: value})


def test_an_input_without_a_shape() -> None:
    model = parsed("(float[3] x) => (float[3] y)", "y = Relu(x)")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(BackendError, match="input x has no shape"):
        import_model(model)
