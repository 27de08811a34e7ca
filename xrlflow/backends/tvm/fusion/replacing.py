"""Puts generated kernels in the place of expressions of a Relax function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import with_main


@dataclass(frozen=True, slots=True)
class Replacement:
    """A kernel that computes a variable. Replacements with the same `key` share one function, which `make` creates and
    whose name is `name`. `read` returns the expressions that the kernel reads; `shape` is the shape of the kernel's
    result, and `kind` its type."""

    name: str
    key: Hashable
    make: Callable[[], Any]
    read: Callable[[], Sequence[Any]]
    shape: Sequence[int]
    kind: str = FLOAT


def with_kernels(module: Any, replacements: Mapping[Any, Replacement]) -> Any:
    """The module in which kernels compute the variables of "main" that are in `replacements`. Expressions that are no
    longer used are removed."""
    if not replacements:
        return module
    tvm()
    from tvm import relax

    functions: dict[Hashable, Any] = {}

    @relax.expr_functor.mutator
    class Replacer(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            replacement = replacements.get(binding.var)
            if replacement is None:
                super().visit_var_binding_(binding)
                return
            if replacement.key not in functions:
                functions[replacement.key] = self.builder_.add_func(replacement.make(), replacement.name)
            read = [self.visit_expr(x) for x in replacement.read()]
            kind = relax.TensorType(replacement.shape, replacement.kind)
            call = relax.call_tir(functions[replacement.key], read, kind)
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    return relax.transform.DeadCodeElimination()(with_main(module, Replacer(module)))
