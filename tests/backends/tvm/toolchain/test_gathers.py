"""Our gathers are those of TVM, without its warning."""

from __future__ import annotations

from typing import Any

import pytest

from xrlflow.backends.tvm.toolchain.import_tvm import tvm


@pytest.mark.parametrize(
    ("table", "indices", "axis"),
    [((5, 6, 7), (3, 2), 1), ((5, 6), (), 0), ((4,), (3,), -1), ((2, 3, 4), (2,), -1), ((9, 3), (1, 5), 0)],
)
def test_a_gather_is_that_of_tvm_without_its_warning(
    table: tuple[int, ...], indices: tuple[int, ...], axis: int, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tvm()
    from tvm import relax, topi

    def theirs(builder: Any, call: Any) -> Any:
        return builder.call_te(topi.take, *call.args, axis, mode="fast")

    builder = relax.BlockBuilder()
    given = [
        relax.Var("x", relax.TensorType(table, "float32")),
        relax.Var("i", relax.TensorType(indices, "int64")),
    ]
    with builder.function("main", given):
        with builder.dataflow():
            taken = builder.emit_output(relax.op.take(*given, axis))
        builder.emit_func_output(taken)
    module = builder.get()
    own = relax.transform.LegalizeOps()(module)
    assert capfd.readouterr().err == ""
    package.ir.assert_structural_equal(own, relax.transform.LegalizeOps({"relax.take": theirs})(module))
    assert "Fast mode segfaults" in capfd.readouterr().err
