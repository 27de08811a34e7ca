"""Tasks: equal kernels are one task, and its key depends on what is computed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.tuning.problems import knobless, matmul, module, target
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning.tasks import Task, TaskError, extract_tasks

pytestmark = pytest.mark.measures


def twice(op: Any, a: Any, b: Any) -> Any:
    return op.tanh(op.matmul(op.matmul(a, b), b))


def test_tasks_alike_are_merged_with_their_weights() -> None:
    tasks = extract_tasks(module(lambda op, a, b: op.matmul(op.matmul(a, b), b), (8, 8), (8, 8)), target())
    assert [t.weight for t in tasks] == [2]


def test_each_kernel_is_a_task_of_one_function_called_main() -> None:
    tasks = extract_tasks(module(twice, (8, 8), (8, 8)), target())
    assert len(tasks) == len({t.key for t in tasks}) == 2
    assert all([v.name_hint for v in t.mod.functions] == ["main"] for t in tasks)
    assert sum(t.weight for t in tasks) == 2


def test_the_key_is_of_the_structure_not_of_names() -> None:
    one = matmul(8)
    function = one.mod["main"].with_attr("global_symbol", "other")
    assert Task.of("renamed", tvm().IRModule({"other": function}), one.target).key == one.key
    assert matmul(16).key != one.key


def test_the_key_is_also_of_the_target() -> None:
    other = tvm().target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2})
    assert Task.of("matmul", matmul().mod, other).key != matmul().key


def test_the_key_is_the_same_in_another_process() -> None:
    code = "from tests.tuning.problems import matmul; print(matmul().key)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == matmul().key


def test_flops_are_those_of_a_multiplication() -> None:
    assert matmul(8).flops == pytest.approx(2 * 8**3)


def test_what_is_no_kernel_is_refused() -> None:
    two = module(twice, (8, 8), (8, 8))
    with pytest.raises(TaskError, match="holds 3 functions, not one kernel"):
        Task.of("model", two, target())
    with pytest.raises(TaskError, match="weight is 0"):
        Task.of("unused", knobless().mod, target(), weight=0)
