"""Parts of a model as modules of their own, to be measured and run alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.kernels.layer_kernels import Floats
from xrlflow.backends.tvm.lowering.compiled import Interface, TvmModel, Value
from xrlflow.backends.tvm.lowering.executable import compile_module
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

if TYPE_CHECKING:
    from tvm.ir import IRModule


def alone(function: Any) -> IRModule:
    """A module with a kernel as its only function."""
    return tvm().IRModule({"main": function.with_attr("global_symbol", "main")})


def run(module: IRModule, inputs: Mapping[str, Floats], machine: Machine) -> Floats:
    """The output of a scheduled module for these inputs. Raises BackendError if the module cannot run here."""
    values = tuple(Value(name, FLOAT, array.shape) for name, array in inputs.items())
    interface = Interface(values, ("out",), machine.triple, machine.cpu, "")
    executable = compile_module(module, machine)
    # One thread: further threads would still spin while kernels are timed in another process.
    with TvmModel(executable, interface, threads=1) as model:
        (output,) = model.run(inputs)
    return np.asarray(output)
