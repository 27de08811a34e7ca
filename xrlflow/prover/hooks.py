"""Temporary changes of the rule language for a proof: drop a condition, or record what rules read.

Rules and their helpers call `require` by the global name under which they imported it. They read values through
properties of `Val` and through `Captures`. Names and properties are replaced here, in this process, while a context
lasts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from xrlflow.rewrite import Captures, Refused, Val, require
from xrlflow.rewrite.rule import Site

# The properties of `Val` whose values conditions compare with numbers.
_READ = ("shape", "rank", "uniform", "ints", "scalar")


@contextmanager
def without(site: Site) -> Iterator[None]:
    """A context in which one call of `require` does nothing. The rule becomes a mutant, which a proof must reject.

    Raises LookupError if no module of this file calls `require` by a global name.
    """

    def require_others(condition: object, reason: str) -> None:
        frame = sys._getframe(1)
        here = (frame.f_code.co_filename, frame.f_lineno)
        if here == site:
            return
        try:
            require(condition, reason)
        except Refused as refused:
            refused.site = here
            raise

    file, line = site
    bindings = [
        (vars(m), name) for m in _modules(file) for name, value in vars(m).items() if value is require
    ]
    if not bindings:
        raise LookupError(f"{file}:{line}: nothing there is called as `require`")
    for names, name in bindings:
        names[name] = require_others
    try:
        yield
    finally:
        for names, name in bindings:
            names[name] = require


def _modules(file: str) -> list[ModuleType]:
    """The modules that were loaded from a file."""
    return [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]


@contextmanager
def watched(show: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which rules get `show(x)` instead of each size, number of a constant and attribute `x` that they
    read.

    This is for conditions only, not for targets.
    """
    with ExitStack() as stack:
        for name in _READ:
            _replace(stack, Val, name, property(_shown(vars(Val)[name].fget, show)))
        _replace(stack, Captures, "__getattr__", _shown(Captures.__getattr__, show))
        yield


def _shown(read: Callable[..., Any], show: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *arguments: show(read(*arguments))


def _replace(stack: ExitStack, owner: type, name: str, value: object) -> None:
    """Set an attribute of a class until the stack is closed."""
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)
