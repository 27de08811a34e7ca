"""Parts of a model as modules of their own, to be measured and run alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.compiled import Interface, TvmModel, Value
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.lower import compile_module
from xrlflow.backends.tvm.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.target import Machine
from xrlflow.tuning.measurable import Floats

if TYPE_CHECKING:
    from tvm.ir import IRModule


def alone(function: Any) -> IRModule:
    """A kernel as a module."""
    return tvm().IRModule({"main": function.with_attr("global_symbol", "main")})


def run(module: IRModule, given: Mapping[str, Floats], machine: Machine) -> Floats:
    """What a scheduled module with these inputs computes. Raises BackendError if it cannot run here."""
    values = tuple(Value(name, FLOAT, array.shape) for name, array in given.items())
    interface = Interface(values, ("out",), machine.triple, machine.cpu, "")
    executable = compile_module(module, machine)
    # One thread: others would still spin while kernels are timed in another process.
    with TvmModel(executable, interface, threads=1) as model:
        (found,) = model.run(given)
    return np.asarray(found)


def with_steps(
    builder: Any, first: Any, steps: Sequence[Step], extras: Sequence[Floats], large: Mapping[int, Any]
) -> Any:
    """The last variable of a Relax function that is being built, after `steps` that follow the variable `first`.

    `extras`: the values of the steps' extras. `large`: the variables of those that are as large as the result.
    """
    found, left = [first], iter(range(len(extras)))
    for step in steps:
        args = [_operand(o, found, left, extras, large) for o in step.operands]
        found.append(builder.emit(_operator(step)(*args)))
    return found[-1]


def _operand(
    given: float | Extra | Earlier,
    found: Sequence[Any],
    left: Iterator[int],
    extras: Sequence[Floats],
    large: Mapping[int, Any],
) -> Any:
    from tvm import relax

    if isinstance(given, Earlier):
        return found[given.step]
    if isinstance(given, Extra):
        number = next(left)
        return relax.const(extras[number].reshape(1, 1, 1, -1)) if given.by_channel else large[number]
    return relax.const(given, FLOAT)


def _operator(step: Step) -> Any:
    from tvm import relax

    found: Any = relax.op
    for name in step.operator.split(".")[1:]:
        found = getattr(found, name)
    return found
