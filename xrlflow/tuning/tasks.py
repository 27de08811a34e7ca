"""Tuning tasks: the different kernels of a module to tune, and how often the model calls each of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xrlflow.backends.tvm.toolchain.import_tvm import tvm

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc


class TaskError(ValueError):
    """No tuning task can be made of a module."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One kernel to tune: a module with one function, `main`, and its target. `mod`: the module; None if the candidates
    are generated kernels, and not schedules of one module.

    `weight`: how often the model calls the kernel. `key`: the name under which measurements are stored. Tasks of equal
    structure and target have equal keys, in every process, whatever names their functions have.
    """

    name: str
    mod: IRModule | None
    target: Target
    weight: int
    key: str
    work: float = 0.0
    """The floating-point operations of one call of the kernel, if there is no module."""

    @staticmethod
    def of(name: str, kernel: IRModule | PrimFunc, target: Target, weight: int = 1) -> Task:
        """The task of a function, or of a module with one function only. Raises TaskError for other modules."""
        package = tvm()
        functions = [kernel] if isinstance(kernel, package.tirx.PrimFunc) else list(kernel.functions.values())
        if len(functions) != 1 or not isinstance(functions[0], package.tirx.PrimFunc):
            raise TaskError(f"task {name}: its module holds {len(functions)} functions, not one kernel")
        if weight < 1:
            raise TaskError(f"task {name}: its weight is {weight}, not a positive number of calls")
        function = functions[0].with_attr("global_symbol", "main").with_attr("tirx.noalias", True)
        mod = package.IRModule({"main": function})
        return Task(name, mod, target, weight, _key(mod, target))

    @property
    def flops(self) -> float:
        """The floating-point operations of one call of the kernel, by TVM's estimate; 0 if the kernel only moves
        data."""
        if self.mod is None:
            return self.work
        return float(tvm().s_tir.analysis.estimate_tir_flops(self.mod))


def extract_tasks(mod: IRModule, target: Target) -> list[Task]:
    """The tuning tasks of a Relax module whose operators are legalised and fused.

    Equal tasks are merged, and their weights added.
    """
    meta = tvm().s_tir.meta_schedule
    tasks: dict[str, Task] = {}
    for extracted in meta.relax_integration.extract_tasks(mod, target, {}):
        task = Task.of(str(extracted.task_name), extracted.dispatched[0], target, int(extracted.weight))
        earlier = tasks.get(task.key)
        tasks[task.key] = replace(earlier, weight=earlier.weight + task.weight) if earlier else task
    return list(tasks.values())


def module_key(mod: IRModule) -> str:
    """TVM's structural hash of a module: independent of names, and equal in every process."""
    return str(tvm().s_tir.meta_schedule.utils.shash2hex(mod))


def target_text(target: Target) -> str:
    """A target as JSON with sorted keys. (In TVM's own text, the order of attributes may change.)"""
    return json.dumps(json.loads(str(target)), sort_keys=True, separators=(",", ":"))


def _key(mod: IRModule, target: Target) -> str:
    return hashlib.sha256(f"{module_key(mod)} {target_text(target)}".encode()).hexdigest()[:24]
