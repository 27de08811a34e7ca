"""Operators whose loops we write ourselves, where TVM's own take longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def legalizations() -> Mapping[str, Callable[[Any, Any], Any]]:
    """For `relax.transform.LegalizeOps`: what becomes of a call, by operator."""
    return {"relax.nn.softmax": _softmax}


def _softmax(builder: Any, call: Any) -> Any:
    return builder.call_te(softmax, call.args[0], int(call.attrs.axis), primfunc_name_hint="softmax")


def softmax(x: Any, axis: int) -> Any:
    """exp(x - max) * (1 / sum): one division for each row, where the schedule works row by row, instead of one for each
    element."""
    from tvm import te, tirx

    shape = list(x.shape)
    axis %= len(shape)

    def row(indices: tuple[Any, ...]) -> tuple[Any, ...]:
        return indices[:axis] + indices[axis + 1 :]

    def reduced(name: str, combine: Callable[..., Any], of: Any) -> Any:
        along = te.reduce_axis((0, shape[axis]), name="k")
        return te.compute(
            [*shape[:axis], *shape[axis + 1 :]],
            lambda *i: combine(of[(*i[:axis], along, *i[axis:])], axis=along),
            name=name,
        )

    most = reduced("softmax_max", te.max, x)
    powers = te.compute(shape, lambda *i: te.exp(x[i] - most[row(i)]), name="softmax_exp")
    total = reduced("softmax_sum", te.sum, powers)
    one = tirx.const(1.0, x.dtype)
    return te.compute(shape, lambda *i: powers[i] * (one / total[row(i)]), name="softmax")
