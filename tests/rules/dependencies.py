"""What the proof of a rule depends on, read from the sources.

A unit is a top-level statement of a module. The class of a rule depends on the units that define the names that it
mentions, these on the units that they mention, and so on, through imports and base classes. A module that is imported
runs: of its statements those that are no mere definitions (loops, calls, definitions with a decorator of our own, which
may register something) count as mentioned. So do whole modules that are used as values. What is only in annotations,
comments or docstrings is not evaluated and counts for nothing.

`test_certificates.py` runs proofs and looks whether they leave the units found here.
"""

from __future__ import annotations

import ast
import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("xrlflow", "rewrite_rules")
# What computes in a proof, or decides which sketches are drawn.
DISTRIBUTIONS = ("numpy", "onnx", "onnxruntime", "ml-dtypes", "islpy", "immutables", "scipy")

_CHANGING = ("setattr", "delattr", "exec", "eval")
"""Functions that may change something else than what their result is bound to."""

Symbol = tuple[str, str]
"""A module and a name in it; "" for the whole module."""
Unit = tuple[str, int]
"""A module, and the position of a top-level statement in it."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {"python": platform.python_version_tuple()[1], **{name: version(name) for name in DISTRIBUTIONS}}


@dataclass(frozen=True, eq=False)
class Module:
    """The statements of a module, and what its names mean: `defined` here, or `imported`."""

    name: str
    statements: Sequence[ast.stmt]
    package: bool
    defined: dict[str, list[int]] = field(default_factory=dict)
    imported: dict[str, Symbol] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)
    _mentions: dict[int, tuple[Mapping[str, Symbol], Sequence[tuple[str, str]]]] = field(default_factory=dict)

    @staticmethod
    @cache
    def read(name: str, text: str, package: bool) -> Module:
        tree = ast.parse(text)
        found = Module(name, tree.body, package)
        for at, statement in enumerate(tree.body):
            for bound in _bound(statement):
                found.defined.setdefault(bound, []).append(at)
            if not _for_types(statement):
                for node in _evaluated_here(statement):
                    found.imported.update(found.imports(node, inside=False))
        return found

    def imports(self, node: ast.AST, inside: bool = True) -> dict[str, Symbol]:
        """What an import binds, or (`inside`) all imports in a node."""
        bound: dict[str, Symbol] = {}
        for inner in ast.walk(node) if inside else [node]:
            if isinstance(inner, ast.Import):
                for alias in inner.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    bound[alias.asname or name] = (name, "")
            elif isinstance(inner, ast.ImportFrom):
                base = self.name.split(".")[: -inner.level + self.package or None] if inner.level else []
                module = ".".join((*base, *filter(None, [inner.module])))
                bound.update({alias.asname or alias.name: (module, alias.name) for alias in inner.names})
        return bound

    def mentions(self, at: int) -> tuple[Mapping[str, Symbol], Sequence[tuple[str, str]]]:
        """What the imports inside a statement bind, and the names that it reads."""
        if at not in self._mentions:
            statement = self.statements[at]
            self._mentions[at] = (self.imports(statement), tuple(dict.fromkeys(_mentioned(statement))))
        return self._mentions[at]

    def text(self, at: int) -> str:
        """The code of a statement, without comments and docstrings."""
        if at not in self._texts:
            wrapped = ast.parse(ast.unparse(self.statements[at]))
            self._texts[at] = ast.dump(_WithoutDocstrings().visit(wrapped))
        return self._texts[at]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds, imports aside."""
    for node in _evaluated_here(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _evaluated_here(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement and what it runs at once, without the bodies of functions and classes."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def _for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _is_text(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [b for b in body if not _is_text(b)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return node


def _mentioned(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a node reads, each with the attribute that is taken of it ("": none); annotations aside."""
    pending: list[ast.AST] = [node]
    while pending:
        inner = pending.pop()
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            yield inner.value.id, inner.attr
            continue
        if isinstance(inner, ast.Name):
            yield inner.id, ""
        for name, value in ast.iter_fields(inner):
            if name in ("annotation", "returns"):
                continue
            pending.extend(
                v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)
            )


class Sources:
    """The modules of a checkout. `texts`: other texts of modules, by name."""

    def __init__(self, root: Path = ROOT, texts: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._changed = texts or {}
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module of ours; None for others."""
        if name not in self._modules:
            file = self.path(name)
            if name.split(".")[0] not in PACKAGES or not file.is_file():
                self._modules[name] = None
            else:
                text = self._changed.get(name) or file.read_text(encoding="utf-8")
                self._modules[name] = Module.read(name, text, file.name == "__init__.py")
        return self._modules[name]

    def path(self, name: str) -> Path:
        """The file of a module of ours."""
        path = self._root.joinpath(*name.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def closure(self, symbols: Iterable[Symbol], beside: _Search | None = None) -> frozenset[Unit]:
        """All units that these symbols depend on. `beside`: those of this search aside."""
        search = _Search(self, beside)
        for symbol in symbols:
            search.need(symbol)
        return search.all()

    def text(self, unit: Unit) -> str:
        """The code of a unit, without comments and docstrings, and what the imported names in it mean."""
        module = self.module(unit[0])
        assert module is not None
        inner, mentions = module.mentions(unit[1])
        imported = {**module.imported, **inner}
        meanings = {
            f"{name}.{attribute}: {'.'.join(self._origin(imported[name], attribute))}"
            for name, attribute in mentions
            if name in imported and (name in inner or name not in module.defined)
        }
        return "\n".join([module.text(unit[1]), *sorted(meanings)])

    def _origin(self, symbol: Symbol, attribute: str = "") -> Symbol:
        """Where a symbol, or an attribute of a module, is defined: imports are followed as far as they are ours."""
        name, what = symbol
        module = self.module(name)
        if not what:
            return symbol if module is None or not attribute else self._origin((name, attribute))
        if module is None or what in module.defined:
            return symbol
        if module.imported.get(what, symbol) != symbol:
            return self._origin(module.imported[what], attribute)
        return self._origin((f"{name}.{what}", ""), attribute) if self.module(f"{name}.{what}") else symbol

    def digest(self, units: Iterable[Unit]) -> str:
        lines = [f"{unit[0]}: {self.text(unit)}" for unit in sorted(units)]  # a name may be bound twice
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @cached_property
    def _proving(self) -> _Search:
        search = _Search(self)
        search.need(("xrlflow.prover", "prove"))
        search.run("rewrite_rules")
        search.all()
        return search

    @cached_property
    def prover(self) -> frozenset[Unit]:
        """What the proof of any rule depends on."""
        return self._proving.all()

    @cached_property
    def prover_digest(self) -> str:
        return self.digest(self.prover)

    def of_rule(self, module: str, name: str) -> frozenset[Unit]:
        """What the proof of a rule depends on besides."""
        return self.closure([(module, name)], self._proving) - self.prover


class _Search:
    """A running closure. `_run`: modules that are imported."""

    def __init__(self, sources: Sources, beside: _Search | None = None) -> None:
        self._sources = sources
        self._units: set[Unit] = set() if beside is None else set(beside._units)
        self._run: set[str] = set() if beside is None else set(beside._run)
        self._pending: list[Unit] = []

    def need(self, symbol: Symbol, attribute: str = "") -> None:
        """A symbol is mentioned, or an attribute of it."""
        name, what = symbol
        module = self._sources.module(name)
        if module is None:
            return
        self.run(name)
        if not what:
            if not attribute:
                self._add(name, range(len(module.statements)))
            else:
                self.need((name, attribute))
        elif what in module.defined:
            self._add(name, module.defined[what])
        elif module.imported.get(what, symbol) != symbol:
            self.need(module.imported[what], attribute)
        elif self._sources.module(f"{name}.{what}") is not None:
            self.need((f"{name}.{what}", ""), attribute)
        else:
            self._add(name, range(len(module.statements)))

    def run(self, name: str) -> None:
        """A module is imported, and the packages that it is in."""
        if name in self._run or (module := self._sources.module(name)) is None:
            return
        self._run.add(name)
        self.run(name.rpartition(".")[0])
        for at, statement in enumerate(module.statements):
            if _for_types(statement):
                continue
            for node in _evaluated_here(statement):
                self._imported(module, node)
            if self._acts(module, statement):
                self._add(name, [at])

    def _imported(self, module: Module, node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names if isinstance(node, ast.Import) else ():
                self.run(alias.name)
            for name, what in module.imports(node).values():
                self.run(name)
                self.run(f"{name}.{what}")

    def _acts(self, module: Module, statement: ast.stmt) -> bool:
        """Whether a statement does more than to bind names to what it defines."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            roots = {name for d in statement.decorator_list for name, _ in _mentioned(d)}
            return any(name in module.defined or self._is_ours(module, name) for name in roots)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            calls = (c.func for c in _evaluated_here(statement) if isinstance(c, ast.Call))
            changes = any(isinstance(c, ast.Name) and c.id in _CHANGING for c in calls)
            return changes or any(not isinstance(t, (ast.Name, ast.Tuple)) for t in targets)
        if isinstance(statement, ast.Expr):
            return not isinstance(statement.value, ast.Constant)
        return not isinstance(statement, (ast.Import, ast.ImportFrom))

    def _is_ours(self, module: Module, name: str) -> bool:
        return module.imported.get(name, ("", ""))[0].split(".")[0] in PACKAGES

    def _add(self, module: str, units: Iterable[int]) -> None:
        for at in units:
            if (module, at) not in self._units:
                self._units.add((module, at))
                self._pending.append((module, at))

    def all(self) -> frozenset[Unit]:
        while self._pending:
            name, at = self._pending.pop()
            module = self._sources.module(name)
            assert module is not None
            statement = module.statements[at]
            if isinstance(statement, (ast.Import, ast.ImportFrom)) or _for_types(statement):
                continue
            inner, mentions = module.mentions(at)
            for target, what in inner.values():
                self.run(target)
                self.run(f"{target}.{what}")
            for mentioned, attribute in mentions:
                if mentioned in inner:
                    self.need(inner[mentioned], attribute)
                elif mentioned in module.defined:
                    self._add(name, module.defined[mentioned])
                elif mentioned in module.imported:
                    self.need(module.imported[mentioned], attribute)
        return frozenset(self._units)
