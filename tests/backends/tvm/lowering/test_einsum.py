"""Einsum as a product of matrices: its results, and which equations are products."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network, numbers
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.einsum import product_of
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures


def einsum(equation: str, x: str, z: str, out: str, kind: str = "float") -> str:
    return (
        f'({kind}[{x}] x, {kind}[{z}] z) => ({kind}[{out}] y) {{ y = Einsum<equation="{equation}">(x, z) }}'
    )


PRODUCTS = {
    "scores": einsum("bhid,bhjd->bhij", "2,3,19,8", "2,3,21,8", "2,3,19,21"),
    "values": einsum("bhij,bhjd->bihd", "2,3,19,21", "2,3,21,8", "2,19,3,8"),
    "rows last": einsum("ki,jk->ji", "5,7", "9,5", "9,7"),
    "batch in the middle": einsum("ibk,kbj->jib", "5,3,7", "7,3,9", "9,5,3"),
    "several rows, columns and sums": einsum("abkl,lckd->bacd", "3,4,5,6", "6,2,5,7", "4,3,2,7"),
    "implicit": einsum("ca,bc", "5,7", "9,5", "7,9"),
    "spaces": einsum(" i k , k j -> i j ", "5,7", "7,9", "5,9"),
    "sizes of 1": einsum("bik,bkj->bij", "1,1,7", "1,7,1", "1,1,1"),
    "doubles": einsum("ik,jk->ij", "5,7", "9,7", "5,9", "double"),
}
OTHERS = {
    "outer": einsum("i,j->ij", "5", "7", "5,7"),
    "vector": einsum("ij,j->i", "5,7", "7", "5"),
    "inner": einsum("bi,bi->b", "3,5", "3,5", "3"),
    "sum over one": einsum("ijk,kl->il", "3,4,5", "5,6", "3,6"),
    "elementwise": einsum("ij,ij->ij", "5,7", "5,7", "5,7"),
}


@pytest.mark.parametrize("name", [*PRODUCTS, *OTHERS])
def test_results(name: str) -> None:
    model = network((PRODUCTS | OTHERS)[name])
    feeds = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (expected,) = runtime.run(feeds)
    with compiled(model, detect(), threads=2) as lowered:
        (result,) = lowered.run(feeds)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_matrix_products(name: str) -> None:
    module = fuse(import_model(network(PRODUCTS[name])), detect(cores=8))
    assert any("matmul" in v.name_hint for v in module.functions)


@pytest.mark.parametrize(
    "equation",
    [
        "ii,ij->ij",
        "...ij,jk->ik",
        "ij,jk,kl->il",
        "ij->ji",
        "ij,jk->ikl",
        "ijl,jk->ik",
        "ij,kl->ijkl",
        "ij,jk->ii",
    ],
)
def test_no_products(equation: str) -> None:
    assert product_of(equation) is None


def test_attention_by_einsum_is_one_kernel() -> None:
    text = (
        "(float[2,3,33,8] q, float[2,3,40,8] k, float[2,3,40,16] v) => (float[2,33,3,16] y) {"
        ' s = Einsum<equation="bhid,bhjd->bhij">(q, k) u = Softmax<axis=-1>(s)'
        ' y = Einsum<equation="bhij,bhjd->bihd">(u, v) }'
    )
    module = fuse(import_model(network(text)), detect())
    (kernel,) = (v.name_hint for v in module.functions if v.name_hint != "main")
    assert "attention" in kernel
