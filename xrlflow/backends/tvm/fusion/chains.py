"""Cuts chains of element-wise operators whose fused kernel would take minutes to compile.

TVM writes a fused kernel as one expression, which repeats an operand for each use of it: with n operators, each of
which reads the result of the operator before twice, the first operator occurs 2^n times. LLVM's code generation, too,
replaces variables by their definitions, so that nested functions (exp of exp of exp) grow as fast. If the expression
would be too large, one operator gets a kernel of its own: the operators after it read its result from memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xrlflow.backends.tvm.kernels.building import OPAQUE
from xrlflow.backends.tvm.toolchain.functions import FROM_C

_PATTERN = "op_pattern"
_REDUCTION = (
    3  # relax's OpPatternKind: functions up to this kind are fused with the computation of their operands
)
# The greatest number of terms of an expression. Such an expression takes 1 to 3 seconds to compile (Zen 3).
_MAX_TERMS = 8192
# For each function: how many times longer f(expression) takes to compile than the expression. Measured by nesting: four
# nested exp, or five nested tanh, take as long as 2^12 products.
_GROWTH = {"exp": 12, "sigmoid": 8, "tanh": 5, "erf": 5}
_CHOICE = 3  # Select: TVM's simplification visits each of its parts several times
_OTHERS = 16  # for functions of the C library, which are called for each lane of a vector


def cut_chains(module: Any) -> Any:
    """The module with long chains divided, so that no fused kernel has an expression of more than `_MAX_TERMS` terms.

    Functions must have the attribute of their pattern.
    """
    from tvm import relax

    main = module["main"]
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    calls = {b.var: (b.value, function) for b in bindings if (function := _called(module, b.value))}
    alone = _in_memory(bindings, calls, main.body.body)
    terms: dict[Any, float] = {}
    cut = set()
    for var, (call, function) in calls.items():
        operands = [terms.get(x, 1.0) if isinstance(x, relax.Var) else 1.0 for x in call.args[1].fields]
        count = _terms(function, operands)
        if count > _MAX_TERMS:
            cut.add(var)
        terms[var] = 1.0 if count > _MAX_TERMS or var in alone or _pattern(function) == _REDUCTION else count
    return _with_own_kernels(module, cut) if cut else module


def _called(module: Any, value: Any) -> Any | None:
    """The function that a value calls, if it may be fused with the kernels of its operands; None for other values."""
    from tvm import relax

    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.call_tir":
        return None
    function = module[value.args[0]]
    usual = len(value.ty_args) == 1 and len(value.args) == 2
    return function if usual and _pattern(function) <= _REDUCTION else None


def _pattern(function: Any) -> int:
    return int((function.attrs or {}).get(_PATTERN, OPAQUE))


def _in_memory(bindings: Sequence[Any], calls: Mapping[Any, Any], result: Any) -> set[Any]:
    """Variables that are written to memory in any case: results of the module, and operands of kernels that are not
    fused."""
    from tvm import relax

    variables: set[Any] = set()

    def note(expression: Any) -> None:
        if isinstance(expression, relax.Var):
            variables.add(expression)

    for binding in bindings:
        if binding.var not in calls:
            relax.analysis.post_order_visit(binding.value, note)
    relax.analysis.post_order_visit(result, note)
    return variables


def _with_own_kernels(module: Any, variables: set[Any]) -> Any:
    """The module in which opaque functions compute these variables of "main". Opaque functions are never fused."""
    from tvm import ir, relax

    builder, main = relax.BlockBuilder(module), module["main"]

    def changed(binding: Any) -> Any:
        if binding.var not in variables:
            return binding
        name, arguments, *_ = binding.value.args
        own = builder.add_func(module[name].with_attr(_PATTERN, OPAQUE), f"{name.name_hint}_alone")
        return relax.VarBinding(binding.var, relax.call_tir(own, arguments, list(binding.value.ty_args)))

    blocks = [type(block)([changed(binding) for binding in block.bindings]) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, main.body.body)
    functions = dict(builder.get().functions)
    functions[module.get_global_var("main")] = relax.Function(
        main.params, body, main.ret_ty, main.is_pure, main.attrs
    )
    return relax.transform.Normalize()(ir.IRModule(functions, attrs=module.attrs))


def _terms(function: Any, counts: Sequence[float]) -> float:
    """The number of terms of the value that a function stores last. `counts`: the number of terms of each parameter."""
    from tvm import tirx

    buffers, last = dict(zip(function.params, counts)), 1.0
    for statement in _statements(function.body):
        if isinstance(statement, tirx.BufferStore):
            last = buffers[statement.buffer] = _Terms(buffers).of(statement.value)
    return last


def _statements(statement: Any) -> Iterator[Any]:
    """A statement and the statements in it, in the order in which they run."""
    yield statement
    inside = [getattr(statement, name, None) for name in ("block", "init", "body", "then_case", "else_case")]
    for part in (*inside, *getattr(statement, "seq", ())):
        if part is not None:
            yield from _statements(part)


class _Terms:
    """Counts the terms of expressions. `buffers`: the number of terms of an element of each buffer; elements of other
    buffers have one term."""

    def __init__(self, buffers: Mapping[Any, float]) -> None:
        self._buffers = buffers
        self._variables: dict[Any, float] = {}

    def of(self, expression: Any) -> float:
        from tvm import ir, tirx

        if isinstance(expression, ir.TensorLoad):
            return self._buffers.get(expression.source, 1.0)
        if isinstance(expression, tirx.Var):
            return self._variables.get(expression, 1.0)
        if isinstance(expression, tirx.Let):
            self._variables[expression.var] = self.of(expression.value)
            return self.of(expression.body)
        if isinstance(expression, ir.Call):
            name = str(getattr(expression.op, "name", "")).rpartition(".")[2]
            growth = _GROWTH.get(name, _OTHERS if name in FROM_C else 1)
            return growth * max(1.0, sum(map(self.of, expression.args)))
        names = ("a", "b", "value", "condition", "true_value", "false_value")
        parts = [part for name in names if isinstance(part := getattr(expression, name, None), ir.Expr)]
        return (_CHOICE if isinstance(expression, tirx.Select) else 1) * (1.0 + sum(map(self.of, parts)))
