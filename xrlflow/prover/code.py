"""Mutants of a rule's code: in one function one comparison, number or operator is changed.

The functions are those of the rule's class, and the functions of the rule's package that they call. A mutant is
compiled from the changed syntax tree. Its code replaces the code of the function, so that every caller runs the mutant.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from xrlflow.prover.thresholds import codes, function_of
from xrlflow.rewrite import AnyRule, RegionRule, Rule
from xrlflow.rewrite.pattern import forget_patterns

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.GtE: ast.Gt,
    ast.Gt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Lt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_QUANTIFIERS = {"all": "any", "any": "all"}
# The definition of a function: the classes around it, from the outermost, and the function itself.
Chain = tuple[ast.ClassDef | ast.FunctionDef, ...]
# Code that is not mutated: assertions, which inform the type checker, and messages.
_IDLE = (ast.Assert, ast.Raise, ast.JoinedStr)
_REASONED = ("require", "profitable", "accurate")


@dataclass(frozen=True, slots=True, order=True)
class CodeMutant:
    """One change. `kind` is comparison, constant, boundary, boolean or arithmetic; `change` is "old -> new".

    `number` distinguishes changes of one function with the same text.
    """

    module: str
    function: str
    kind: str
    change: str
    number: int = 0

    def __str__(self) -> str:
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.module}.{self.function}: {self.change}{again}"


def functions_of(rule: AnyRule) -> dict[str, FunctionType]:
    """By "module:name", the functions of a rule's class and the functions of its package that they call."""
    functions: dict[str, FunctionType] = {}
    home = type(rule).__module__.partition(".")[0]
    for kind in type(rule).__mro__:
        if kind not in Rule.__mro__ and kind not in RegionRule.__mro__:
            _methods(kind, home, functions)
    return functions


def _methods(kind: type, home: str, functions: dict[str, FunctionType]) -> None:
    for value in vars(kind).values():
        function = function_of(value)
        if function is not None:
            _add(function, home, functions)


def _add(function: FunctionType, home: str, functions: dict[str, FunctionType]) -> None:
    key = f"{function.__module__}:{function.__qualname__}"
    if key in functions or function.__module__.partition(".")[0] != home:
        return
    if not function.__code__.co_filename.endswith(".py"):
        return  # the function is generated, for example by a dataclass
    functions[key] = function
    for code in codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            called = None if value is None else function_of(value)
            if called is not None:
                _add(called, home, functions)
            elif _is_of(value, home):
                _methods(value, home, functions)


def _is_of(value: Any, home: str) -> TypeGuard[type]:
    """Whether a value is a class of package `home`, but no rule."""
    is_class = isinstance(value, type) and not issubclass(value, (Rule, RegionRule))
    return is_class and value.__module__.partition(".")[0] == home


@lru_cache(maxsize=64)
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


@lru_cache(maxsize=1024)
def _chain(module: str, first: int, name: str) -> Chain | None:
    """The classes around a function, and the function itself; None if its source is no `def`."""

    def search(body: list[ast.stmt], above: Chain) -> Chain | None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if isinstance(node, ast.FunctionDef) and node.name == name and line == first:
                    return (*above, node)
                if (
                    isinstance(node, ast.ClassDef)
                    and (chain := search(node.body, (*above, node))) is not None
                ):
                    return chain
        return None

    return search(_tree(module).body, ())


def _mutable(function: ast.AST) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """The nodes of a syntax tree that can be changed: node, "boundary" if it stands in a subscript (else ""), and the
    outermost expression around it.

    Code that evaluates the node runs one of the lines of that expression.
    """

    def walk(node: ast.AST, inside: str, span: ast.expr | None) -> Iterator[tuple[ast.AST, str, ast.expr]]:
        if isinstance(node, _IDLE):
            return
        if isinstance(node, ast.expr):
            span = span or node
            yield node, inside, span
        if isinstance(node, ast.Subscript):
            yield from walk(node.value, inside, span)
            yield from walk(node.slice, "boundary", span)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REASONED:
            yield from walk(node.args[0], "", span)
            return
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and isinstance(
                node, (ast.FunctionDef, ast.arg, ast.arguments, ast.AnnAssign)
            ):
                continue
            for item in child if isinstance(child, list) else [child]:
                if isinstance(item, ast.AST):
                    yield from walk(item, inside, span)

    assert isinstance(function, ast.FunctionDef)
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring is not mutated
        yield from walk(statement, "", None)


def _changes(node: ast.AST, inside: str) -> Iterator[tuple[str, str, Any]]:
    """The possible changes of a node: kind of the change, field (and index in it), new value."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            yield "comparison", f"ops.{i}", _COMPARISONS[type(operator)]()
    elif isinstance(node, ast.BoolOp):
        yield "boolean", "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", "op", _ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if not isinstance(node.operand, ast.Constant):
            yield "arithmetic", "op", ast.UAdd()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "boolean", "operand", ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _QUANTIFIERS:
        yield "boolean", "func", ast.Name(_QUANTIFIERS[node.func.id], ast.Load())
    elif isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield "boolean", "value", not value
        elif isinstance(value, int):
            yield inside or "constant", "value", value + 1
        elif isinstance(value, float):
            yield "constant", "value", value * 2 if value else 1.0


def _set(node: ast.AST, field: str, value: Any) -> Any:
    """Put a value into a field of a node. Returns the old value."""
    name, _, index = field.partition(".")
    if index:
        old = getattr(node, name)[int(index)]
        getattr(node, name)[int(index)] = value
        return old
    old = getattr(node, name)
    setattr(node, name, value)
    return old


def mutable_lines(function: FunctionType) -> frozenset[frozenset[tuple[str, int]]]:
    """For each expression of a function that can be changed, its lines (file, line number)."""
    code = function.__code__
    chain = _chain(function.__module__, code.co_firstlineno, code.co_name)
    targets = _mutable(chain[-1]) if chain is not None else ()
    return frozenset(
        _lines(function, span) for node, inside, span in targets if any(True for _ in _changes(node, inside))
    )


def _lines(function: FunctionType, span: ast.expr) -> frozenset[tuple[str, int]]:
    file = function.__code__.co_filename
    return frozenset((file, n) for n in range(span.lineno, (span.end_lineno or span.lineno) + 1))


def _numbers(function: FunctionType, span: ast.expr) -> frozenset[int]:
    """The integers in an expression: literals, and module constants that it names."""
    values = [n.value for n in ast.walk(span) if isinstance(n, ast.Constant)]
    values += [function.__globals__.get(n.id) for n in ast.walk(span) if isinstance(n, ast.Name)]
    return frozenset(v for v in values if type(v) is int)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A mutant and its compiled code. `lines` and `numbers` are those of the outermost expression around the change."""

    mutant: CodeMutant
    code: CodeType
    lines: frozenset[tuple[str, int]]
    numbers: frozenset[int]


def mutants_of(function: FunctionType) -> Iterator[Compiled]:
    """All mutants of a function; none if its source is not a `def`."""
    module = function.__module__
    code = function.__code__
    chain = _chain(module, code.co_firstlineno, code.co_name)
    if chain is None or code.co_freevars not in ((), ("__class__",)):
        return
    tree = _module_of(chain)
    (definition,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name][
        :1
    ]
    counts = Counter[str]()
    for node, inside, span in list(_mutable(definition)):
        for kind, field, value in list(_changes(node, inside)):
            before = _text(node, tree)
            old = _set(node, field, value)
            try:
                change = f"{before} -> {_text(node, tree)}"
                compiled = compile(ast.fix_missing_locations(tree), code.co_filename, "exec")
            finally:
                _set(node, field, old)
            number = counts[change]
            counts[change] += 1
            function_code = next(
                c
                for c in codes(compiled)
                if c.co_name == code.co_name and c.co_firstlineno == code.co_firstlineno
            )
            mutant = CodeMutant(module, function.__qualname__, kind, change, number)
            yield Compiled(mutant, function_code, _lines(function, span), _numbers(function, span))


def _text(node: ast.AST, tree: ast.AST) -> str:
    """The source text of a node; for a constant the text of the expression around it."""
    if isinstance(node, ast.Constant):
        for above in ast.walk(tree):
            if node in ast.iter_child_nodes(above) and isinstance(above, ast.expr):
                return ast.unparse(ast.fix_missing_locations(above))
    return ast.unparse(ast.fix_missing_locations(node))


def _module_of(chain: Chain) -> ast.Module:
    """A module that has only this function, inside its classes, with its original line numbers."""
    body: ast.stmt = copy.deepcopy(chain[-1])
    for around in reversed(chain[:-1]):
        shell = ast.ClassDef(around.name, [], [], [body], [])
        if sys.version_info >= (3, 12):
            shell.type_params = []
        body = ast.copy_location(shell, around)
    (future,) = ast.parse("from __future__ import annotations").body
    module = ast.Module([future, body], [])
    return ast.fix_missing_locations(module)


@contextmanager
def put(function: FunctionType, code: CodeType) -> Iterator[None]:
    """A context in which a function has other code. The caches of its package are cleared at the beginning and at the
    end.
    """
    home = function.__module__.partition(".")[0]
    original = function.__code__
    function.__code__ = code
    forget(home)
    try:
        yield
    finally:
        function.__code__ = original
        forget(home)


def forget(home: str) -> None:
    """Clear the caches of all functions of a package, and the patterns of rules."""
    forget_patterns()
    for clear in _caches(home):
        clear()


@lru_cache(maxsize=8)
def _caches(home: str) -> tuple[Callable[[], None], ...]:
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == home]
    values = {id(v): v for m in modules for v in vars(m).values()}
    return tuple(clear for v in values.values() if (clear := getattr(v, "cache_clear", None)) is not None)
