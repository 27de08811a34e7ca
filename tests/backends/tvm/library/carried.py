"""Small models, each of which becomes a region of one library of kernels.

`python -m tests.backends.tvm.library.carried FOLDER` writes them for `in_a_runtime.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto

from xrlflow.backends.protocol import Array
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.code_generation import CompiledRegion, compile_region
from xrlflow.backends.tvm.library.kernel_library import KernelLibrary, kernel_library
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.onnxio.regions import Region, region_of, with_functions


def numbers(*shape: int) -> str:
    """The text of an initializer: its shape, and numbers of moderate size."""
    return ", ".join(str(round(math.sin(i), 3)) for i in range(math.prod(shape)))


# The oldest ONNX Runtime that loads libraries of kernels supports these versions of the format and of the operators.
_HEAD = '<ir_version: 8, opset_import: ["": 17]> agraph '
TEXTS = {
    "sum": "(float[4,8] x, float[4,8] other) => (float[4,8] y) { a = Add(x, other) y = Relu(a) }",
    "swapped": "(float[4,8] x, float[4,8] other) => (float[4,8] y) { a = Neg(other) y = Sub(a, x) }",
    "input": "(float[4,8] x) => (float[4,8] y, float[4,8] z) { y = Identity(x) z = Relu(x) }",
    "constant": "(float[2] x) => (float[2] y, float[2] z)"
    " { y = Constant<value = float[2] {1.5, -2.5}>() z = Relu(x) }",
    "alone": "() => (float[2] y) { y = Constant<value = float[2] {1.5, -2.5}>() }",
    "shape": "(float[4,8] x) => (int64[2] y, float[4,8] z, int64[1] n, int64[0] e) <float one = {1}>"
    " { y = Shape(x) z = Relu(x) n = Shape<start = 1>(x) e = Shape(one) }",
    "twice": "(float[4,8] x) => (float[4,8] y, float[4,8] z) { y = Relu(x) z = Identity(y) }",
    "reshape": "(float[4,8] x) => (float[8,4] y, float[2,16] z)"
    " <int64[2] s = {8, 4}, int64[2] t = {2, 16}> { y = Reshape(x, s) a = Relu(x) z = Reshape(a, t) }",
    "empty": "(float[0,8] x, float[2,8] other) => (float[0,8] y, float[2,8] z)"
    " { y = Relu(x) z = Concat<axis = 0>(x, other) }",
    "scalar": "(float x, float other) => (float y) { a = Add(x, other) y = Sqrt(a) }",
    "dimensions": f"(float[{'2,' + '1,' * 18}3] x) => (float[{'2,' + '1,' * 18}3] y) {{ a = Neg(x) y = Relu(a) }}",
    "bool": "(bool[5] x, bool[5] other) => (bool[5] y) { a = And(x, other) y = Not(a) }",
    "int64": "(int64[5] x, int64[5] other) => (int64[5] y) { a = Add(x, other) y = Mul(a, other) }",
    "uint8": "(bool[5,3] c, uint8[5,3] x, uint8[5,3] other) => (uint8[3,5] y)"
    " { a = Where(c, x, other) y = Transpose(a) }",
    "float16": "(float16[7] x, float16[7] other) => (float16[7] y) { a = Add(x, other) y = Mul(a, other) }",
    "float64": "(double[7] x, double[7] other) => (double[7] y) { a = Add(x, other) y = Mul(a, other) }",
    "gather": "(float[6,3] x, int64[4] index) => (float[4,3] y)"
    " { a = Gather<axis = 0>(x, index) y = Relu(a) }",
    "symbolic": "(float[N,8] x, float[N,8] other) => (float[N,8] y) { a = Mul(x, other) y = Tanh(a) }",
    "matmul": "(float[64,96] x) => (float[64,64] y)"
    f" <float[96,64] w = {{{numbers(96, 64)}}}> {{ a = MatMul(x, w) b = Softmax(a) y = Relu(b) }}",
    "conv": "(float[1,3,16,16] x) => (float[1,8,8,8] y)"
    f" <float[8,3,3,3] w = {{{numbers(8, 3, 3, 3)}}}, float[8] b = {{{numbers(8)}}}>"
    " { a = Conv<pads = [1, 1, 1, 1]>(x, w, b) c = Relu(a)"
    " y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c) }",
}  # fmt: skip
# Kernels are compiled for these sizes where the model has a symbolic one.
SIZES = {"N": 3}


@dataclass(frozen=True, slots=True)
class Carried:
    """A model, and its whole graph as a compiled region."""

    plain: ModelProto
    region: Region
    compiled: CompiledRegion
    name: str

    def function(self, domain: str, *, weights_as_inputs: bool = False) -> ModelProto:
        return with_functions(
            self.plain, {self.name: self.region}, domain, weights_as_inputs=weights_as_inputs
        )


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(_HEAD + text)


def carried(name: str, model: ModelProto, machine: Machine, *, weights_as_inputs: bool = False) -> Carried:
    """A model whose whole graph is compiled as a region."""
    region = region_of(model.graph, range(len(model.graph.node)))
    values = {value.name: value.type for value in (*model.graph.input, *model.graph.output)}
    types = {}
    for value, kind in values.items():
        types[value] = onnx.TypeProto()
        types[value].CopyFrom(kind)
        for dim in types[value].tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = SIZES[dim.dim_param]
    compiled = compile_region(model, region, types, machine, weights_as_inputs=weights_as_inputs)
    return Carried(model, region, compiled, name)


def built(models: Mapping[str, ModelProto], machine: Machine) -> tuple[KernelLibrary, dict[str, Carried]]:
    """Compile the models. Returns the library with all their kernels, and the compiled models."""
    regions = {name: carried(f"Region_{i}", model, machine) for i, (name, model) in enumerate(models.items())}
    return kernel_library({m.name: m.compiled for m in regions.values()}, machine), regions


def all_built(cpu: str | None = None, triple: str | None = None) -> tuple[KernelLibrary, dict[str, Carried]]:
    """Compile all models of `TEXTS`, for this processor or the given one."""
    return built({name: parsed(text) for name, text in TEXTS.items()}, detect(cpu, 2, triple))


def feeds_of(model: ModelProto, seed: int = 0) -> dict[str, Array]:
    """Random inputs. Integers are small, some of them negative."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [SIZES[dim.dim_param] if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            feeds[value.name] = np.asarray(rng.random(shape)).astype(dtype)
        else:
            feeds[value.name] = np.asarray(rng.integers(0 if dtype.kind in "ub" else -2, 2, shape)).astype(
                dtype
            )
    return feeds


def for_another_processor(library: KernelLibrary) -> KernelLibrary:
    """The same library, but it claims to need an instruction that no processor has."""
    start = "xrlflow_features[] = {"
    assert start in library.tables
    return replace(library, tables=library.tables.replace(start, f'{start}"imaginary", '))


def save_all(folder: Path, library: KernelLibrary, regions: Mapping[str, Carried]) -> None:
    """Write `NAME.onnx`, `NAME.plain.onnx` and `NAME.npz` (inputs) for each model, and `kernels.so`, into a folder."""
    for name, model in regions.items():
        onnx.save(model.plain, folder / f"{name}.plain.onnx")
        onnx.save(model.function(library.domain), folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", **feeds_of(model.plain))  # type: ignore[arg-type]
    library.save(folder / "kernels.so")


def with_another_body(regions: Carried, domain: str) -> ModelProto:
    """A model whose kernels compute something else than the nodes of its function."""
    model = regions.function(domain)
    model.functions[0].node[-1].op_type = "Sigmoid"
    return model


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    library, regions = all_built()
    save_all(folder, library, regions)
    for_another_processor(library).save(folder / "foreign.so")
    onnx.save(with_another_body(regions["symbolic"], library.domain), folder / "other-body.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
