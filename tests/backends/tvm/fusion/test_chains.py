"""Long chains of element-wise operators are divided into kernels that compile quickly, without a change of results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_pooling import compare
from tests.levels import whole
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion import chains
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

pytestmark = pytest.mark.measures

LINKS = {
    "exp": " {y}_ = Neg({x})\n {y} = Exp({y}_)",
    "sigmoid": " {y} = Sigmoid({x})",
    "tanh": " {y} = Tanh({x})",
    "erf": " {y} = Erf({x})",
    "softplus": " {y} = Softplus({x})",
    "arc sine": " {y}_ = Mul({x}, half)\n {y} = Asin({y}_)",
    "silu": " {y}_ = Sigmoid({x})\n {y} = Mul({y}_, {x})",
    "twice": " {y}_0 = Relu({x})\n {y}_1 = Neg({x})\n {y}_2 = Sub({y}_0, {y}_1)\n {y} = Mul({y}_2, half)",
    "power": " {y}_ = Mul({x}, {x})\n {y} = Mul({y}_, half)",
    "choice": " {y}_0 = Greater({x}, half)\n {y}_1 = Neg({x})\n {y} = Where({y}_0, {x}, {y}_1)",
    "whole, distance": " {y}_ = Abs({x})\n {y} = Sub({y}_, one)",
    "whole, sign": " {y}_ = Sign({x})\n {y} = Sub({y}_, one)",
}


def chain(link: str, length: int) -> str:
    names = ["x", *(f"a{i}" for i in range(length - 1)), "y"]
    lines = [LINKS[link].format(x=x, y=y) for x, y in itertools.pairwise(names)]
    kind = "int32" if link.startswith("whole") else "float"
    constants = "float half = {0.5}, int32 one = {1}"
    return f"({kind}[4,8] x) => ({kind}[4,8] y) <{constants}> {{" + "\n".join(lines) + " }"


def primitive(module: Any) -> list[Any]:
    from tvm import tirx

    return [function for function in module.functions.values() if isinstance(function, tirx.PrimFunc)]


@pytest.mark.parametrize("link", whole(LINKS, ("exp", "erf", "twice", "choice", "whole, distance")))
def test_long_chains_compile_and_stay_the_same(link: str) -> None:
    compare(chain(link, 24), detect())


@pytest.mark.parametrize("link", LINKS)
def test_no_kernel_is_too_large(link: str) -> None:
    fused = fuse(import_model(network(chain(link, 24))), detect(cores=1))
    for function in primitive(fused):
        assert chains._terms(function, [1.0] * len(function.params)) <= chains._MAX_TERMS


@pytest.mark.parametrize("link", LINKS)
def test_short_chains_are_one_kernel(link: str) -> None:
    assert len(primitive(fuse(import_model(network(chain(link, 2))), detect(cores=1)))) == 1


def test_what_is_in_memory_anyway_is_not_counted() -> None:
    """Every tanh is also an output, so it is in memory for the kernels that follow."""
    lines = "\n".join(f" a{i + 1} = Tanh(a{i})" for i in range(12))
    outputs = ", ".join(f"float[4,8] a{i + 1}" for i in range(12))
    module = fuse(import_model(network(f"(float[4,8] a0) => ({outputs}) {{{lines} }}")), detect(cores=1))
    assert not [name for name in module.get_global_vars() if "alone" in name.name_hint]


def test_terms_of_an_expression() -> None:
    tvm()
    from tvm import te, tirx

    def of(body: Any, *given: float) -> float:
        tensors = [te.placeholder((4,), name=f"x{i}") for i in range(len(given))]
        result = te.compute((4,), lambda i: body(*(x[i] for x in tensors)))
        return chains._terms(te.create_prim_func([*tensors, result]), given)

    assert of(lambda x, y: x + y, 10, 20) == 31
    assert of(lambda x: x * x, 10) == 21
    assert of(lambda x: tirx.tanh(x), 10) == 50
    assert of(lambda x: tirx.exp(tirx.exp(x)), 1) == 144
    zero = tirx.const(0.0, "float32")
    assert of(lambda x: tirx.Select(x > zero, x, x + x), 10) == 3 * (1 + 12 + 10 + 21)
    variable = tirx.Var("t", "float32")
    assert of(lambda x: tirx.Let(variable, x + x, variable * variable), 10) == 43


def test_terms_of_a_function_with_stages() -> None:
    tvm()
    from tvm import te

    x = te.placeholder((4,), name="x")
    first = te.compute((4,), lambda i: x[i] + x[i], name="first")
    second = te.compute((4,), lambda i: first[i] * first[i], name="second")
    assert chains._terms(te.create_prim_func([x, second]), [10.0]) == 43
