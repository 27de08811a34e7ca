"""Small buffers are on the stack, large ones are not."""

from __future__ import annotations

import pytest

from models.operators import operator
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.schedules.dispatch import apply
from xrlflow.backends.tvm.schedules.ratings import Tile, TileBlocking
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.stack import CODE
from xrlflow.tuning.store import Setting

pytestmark = pytest.mark.measures


@pytest.mark.parametrize(("floats", "called"), [(16, False), (384, False), (1024, False), (1040, True)])
def test_buffers_up_to_a_page_take_no_workspace(floats: int, called: bool) -> None:
    """The kernel needs the squares of a row twice, so they have a buffer."""
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


def test_tiles_of_accumulators_take_no_workspace() -> None:
    """TVM takes local buffers of any size from its workspaces. This one has 896 bytes."""
    package = tvm()
    model = operator("(float[7,32] x, float[32,96] z) => (float[7,96] y) { y = MatMul(x, z) }")
    (function,) = (
        f for v, f in fuse(import_model(model), detect()).functions.items() if v.name_hint != "main"
    )
    mod = package.IRModule({"main": function.with_attr("global_symbol", "main")})
    sch = apply(mod, detect(), TileBlocking(Tile(7, 32, 8), False))
    library = package.compile(sch.mod, target=detect().target())
    assert "ptr @__TVMBackendAllocWorkspace" not in library.mod.inspect_source("ll")


def test_times_say_what_code_they_are_of() -> None:
    assert CODE in Setting.here(detect().target(), 1).tvm
