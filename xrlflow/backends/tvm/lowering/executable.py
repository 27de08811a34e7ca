"""From a module of primitive functions to an executable: schedules, packing of weights, memory, and LLVM."""

from __future__ import annotations

from typing import Any

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.tvm.fusion.open_sizes import answering
from xrlflow.backends.tvm.fusion.slices import in_place
from xrlflow.backends.tvm.kernels.attention import SCHEDULED
from xrlflow.backends.tvm.lowering.plan import sequence
from xrlflow.backends.tvm.schedules.dispatch import schedule
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import sizes, with_main
from xrlflow.backends.tvm.toolchain.target import Machine

_SYMBOL = "global_symbol"


def schedule_all(module: Any, machine: Machine) -> Any:
    """Schedule every primitive function. Raises BackendError if TVM refuses the module."""
    package = tvm()
    from tvm import tirx

    updates = {}
    for name, function in module.functions.items():
        if not isinstance(function, tirx.PrimFunc) or SCHEDULED in (function.attrs or {}):
            continue
        one = package.IRModule({"main": function.with_attr(_SYMBOL, "main")})
        with answering("compile", module), heeding_interrupts():
            scheduled = schedule(one, machine).mod["main"]
        updates[name] = scheduled.without_attr(_SYMBOL).with_attr(SCHEDULED, True)
    for name, function in updates.items():
        module.update_func(name, function)
    return module


def _without_empty_constants(module: Any) -> Any:
    """The module in which allocated tensors replace constants without elements: TVM can write such constants, but not
    read them."""
    from tvm import relax

    @relax.expr_functor.mutator
    class Replacer(relax.PyExprMutator):  # type: ignore[misc]
        def visit_generic_const_(self, empty: Any) -> Any:
            shape = sizes(empty)
            if shape is None or 0 not in shape:
                return empty
            return self.builder_.emit(
                relax.op.builtin.alloc_tensor(relax.ShapeExpr(shape), str(empty.ty.dtype), 0)
            )

    return with_main(module, Replacer(module))


@heeding_interrupts()
def compile_module(module: Any, machine: Machine) -> Any:
    """Make an executable: constants are packed, memory is planned, and LLVM compiles kernels.

    Raises BackendError if TVM refuses the module.
    """
    package = tvm()
    from tvm import relax

    target = machine.target()
    passes = relax.transform
    # The two halves of TVM's default pipeline. It has no option for a pass between them, so they are listed here.
    first_half = [relax.backend.DispatchSampling(), relax.backend.DispatchSortScan(), passes.LegalizeOps()]
    second_half = [
        passes.StaticPlanBlockMemory(), passes.LowerAllocTensor(), passes.KillAfterLastUse(),
        passes.LowerRuntimeBuiltin(), passes.ComputePrimValue(), passes.VMShapeLower(), passes.AttachGlobalSymbol(),
    ]  # fmt: skip
    with answering("compile", module), target, package.transform.PassContext(opt_level=3):
        module = in_place(sequence(package.transform.Sequential(first_half)(module)), machine)
        module = _without_empty_constants(module)
        return package.compile(module, target, relax_pipeline=package.transform.Sequential(second_half))
