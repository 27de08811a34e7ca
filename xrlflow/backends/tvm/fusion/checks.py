"""Checks that indices are within bounds.

A module carries its checks as an attribute. Constant indices are checked when the module is compiled, other indices at
each run. `lowering.bounds` adds checks to a module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.toolchain.weights import array_of

_ATTRIBUTE = "xrlflow.checks"


@dataclass(frozen=True, slots=True)
class Check:
    """All numbers of one tensor must be from `low` to `high`.

    `text`: the parts of the error message. A number outside the bounds is written between two of the parts.
    """

    text: tuple[str, ...]
    low: int
    high: int

    def trouble(self, least: int, greatest: int) -> str | None:
        """The error message for a tensor whose least and greatest number are these; None if both are within the
        bounds."""
        if self.low <= least and greatest <= self.high:
            return None
        return str(least if least < self.low else greatest).join(self.text)


def complain(checks: Sequence[Check], ends: Any) -> None:
    """Raise BackendError for the first check that fails. `ends`: the least and the greatest number of each tensor,
    [checks, 2]. (`ends` is the additional output of the model.)"""
    for check, (least, greatest) in zip(checks, ends.tolist(), strict=True):
        if trouble := check.trouble(least, greatest):
            raise BackendError(trouble)


def checks_of(module: Any) -> tuple[Check, ...]:
    """The checks that `with_checks` attached to a Relax module, in the order of its additional output."""
    stored = (module["main"].attrs or {}).get(_ATTRIBUTE)
    return checks_from(json.loads(str(stored))) if stored is not None else ()


def checks_from(stored: Iterable[Mapping[str, Any]]) -> tuple[Check, ...]:
    """The checks that a list from a JSON document describes."""
    return tuple(Check(tuple(c["text"]), int(c["low"]), int(c["high"])) for c in stored)


def with_checks(module: Any, checks: Sequence[Check]) -> Any:
    """The module with checks attached."""
    if checks:
        stored = json.dumps([asdict(check) for check in checks])
        module.update_func(module.get_global_var("main"), module["main"].with_attr(_ATTRIBUTE, stored))
    return module


def ends_of(array: Any) -> Any:
    """The least and the greatest number of an array, as [1, 2]."""
    import numpy as np

    return np.asarray([[int(array.min()), int(array.max())]], object)


def check_constants(module: Any) -> Any:
    """Check those tensors that have become constants, and return the module unchanged. Raises BackendError if a check
    fails."""
    from tvm import relax
    from tvm.ir import GenericConst

    checks = checks_of(module)
    if not checks:
        return module
    main = module["main"]
    values = relax.analysis.get_var2val(main)

    def value(expression: Any) -> Any:
        while isinstance(expression, relax.Var) and expression in values:
            expression = values[expression]
        return expression

    ends = value(value(main.body.body).fields[-1])
    if isinstance(ends, GenericConst):
        complain(checks, array_of(ends))
    else:
        for check, operand in zip(checks, ends.args[1].fields, strict=True):
            if isinstance(operand := value(operand), GenericConst):
                complain([check], ends_of(array_of(operand)))
    return module
