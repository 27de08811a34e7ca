"""Small buffers are on the stack, large ones are not."""

from __future__ import annotations

import pytest

from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.load import tvm


@pytest.mark.parametrize(("floats", "called"), [(16, False), (384, False), (1024, False), (1040, True)])
def test_buffers_up_to_a_page_take_no_workspace(floats: int, called: bool) -> None:
    """A row of a function that needs its squares twice, in a buffer of its own."""
    package = tvm()
    from tvm import te
    from tvm.s_tir import Schedule

    a = te.placeholder((64, floats), name="a")
    squares = te.compute(a.shape, lambda i, j: a[i, j] * a[i, j], name="squares")
    flipped = te.compute(a.shape, lambda i, j: squares[i, j] + squares[i, floats - 1 - j], name="flipped")
    sch = Schedule(package.IRModule({"main": te.create_prim_func([a, flipped])}))
    row, _ = sch.get_loops(sch.get_sblock("flipped"))
    sch.compute_at(sch.get_sblock("squares"), row)
    sch.parallel(row)
    library = package.compile(sch.mod, target=detect().target())
    assert ("ptr @__TVMBackendAllocWorkspace" in library.mod.inspect_source("ll")) == called
