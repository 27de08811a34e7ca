"""Which constants of a module are made of which weights, and how.

Layers of a network often differ in their weights alone. A region is compiled once for all of them: constants that were
only moved (transposed, packed into panels) are made again from the other weights (see `library.forms`). That needs to
be certain, so everything else that looks at the numbers of a weight is noted, and the region is not used again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrlflow.backends.protocol import Array

SMALL = 64


def is_weight(dtype: np.dtype[Any], elements: int) -> bool:
    """Whether a constant counts as a weight. Integers may be sizes and indices, and a few floats may be parameters:
    these become numbers in the code of kernels."""
    return elements > SMALL and (dtype.kind == "f" or dtype.name == "bfloat16")


Step = tuple[Callable[..., Array], tuple[Hashable, ...]]
"""A function that moves the elements of an array, and its further arguments."""


@dataclass(frozen=True, slots=True)
class Made:
    """How a constant is made of a weight: by these steps, one after the other."""

    weight: str
    steps: tuple[Step, ...] = ()

    def of(self, array: Array) -> Array:
        """The constant that these steps make of another weight."""
        for function, arguments in self.steps:
            array = function(array, *arguments)
        return array


@dataclass(slots=True)
class Followed:
    """The weights of one compilation. `looked_at`: whether anything but moves depends on their numbers.

    `shared`: constants of other compilations of the same region, for other sizes: they are used again, and new ones are
    added.
    """

    looked_at: bool = False
    shared: dict[Made, Any] = field(default_factory=dict)
    _made: dict[int, Made] = field(default_factory=dict)  # by the address of a constant's elements
    _kept: list[Any] = field(default_factory=list)  # so that no address is used twice

    def note(self, constant: Any, made: Made) -> None:
        view = _view(constant)
        if is_weight(view.dtype, view.size):
            self._made[view.ctypes.data] = made
            self._kept.append(view)
            self.shared[made] = constant

    def made(self, constant: Any) -> Made | None:
        """How a constant of Relax is made; None if it is no weight."""
        return self._made.get(_view(constant).ctypes.data)


_followed: ContextVar[Followed | None] = ContextVar("followed", default=None)


@contextmanager
def following(shared: dict[Made, Any] | None = None) -> Iterator[Followed]:
    """Follow the weights of the modules that this thread compiles. `shared`: see `Followed`."""
    followed = Followed(shared={} if shared is None else shared)
    token = _followed.set(followed)
    try:
        yield followed
    finally:
        _followed.reset(token)


def weight(name: str, read: Callable[[], Array]) -> Any:
    """The constant of the weight `name`, whose numbers `read` returns."""
    return _constant(Made(name), read)


def imported(inputs: Iterable[Any], results: Sequence[Any]) -> None:
    """Note what the importer made of inputs. A weight counts as looked at unless all results are yet to be computed, or
    are known to be made of it."""
    followed = _followed.get()
    if followed is None or all(_is_followed(result, followed) for result in results):
        return
    from tvm.ir import GenericConst

    read = [x for x in inputs if isinstance(x, GenericConst)]
    followed.looked_at |= any(followed.made(x) is not None for x in read)


def _is_followed(result: Any, followed: Followed) -> bool:
    from tvm import relax
    from tvm.ir import GenericConst

    if isinstance(result, GenericConst):
        return followed.made(result) is not None
    return isinstance(result, relax.Call | relax.Var | relax.TupleGetItem)


def made_of(constant: Any) -> Made | None:
    """How a constant is made of a weight; None if it depends on no weight, or if weights are not followed."""
    followed = _followed.get()
    return None if followed is None else followed.made(constant)


def plain_array(constant: Any) -> Array:
    """The numbers of a constant, not to be written to, for a caller that keeps them as they are."""
    return _view(constant)


def array_of(constant: Any) -> Array:
    """The numbers of a constant, not to be written to. If it is made of a weight, these numbers count as looked at."""
    followed = _followed.get()
    if followed is not None and followed.made(constant) is not None:
        followed.looked_at = True
    return _view(constant)


def moved(constant: Any, function: Callable[..., Array], *arguments: Hashable) -> Any:
    """The constant whose array `function` makes of the array of another constant."""
    before = made_of(constant)
    made = None if before is None else Made(before.weight, (*before.steps, (function, arguments)))
    return _constant(made, lambda: function(_view(constant), *arguments))


def _constant(made: Made | None, compute: Callable[[], Array]) -> Any:
    from tvm import relax

    followed = _followed.get()
    known = None if followed is None or made is None else followed.shared.get(made)
    if known is None:
        array = np.asarray(compute(), order="C")
        known = relax.const(array, str(array.dtype))
    if followed is not None and made is not None:
        followed.note(known, made)
    return known


def folded(module: Any) -> Any:
    """The module after TVM has computed what depends on constants alone. Weights in it count as looked at."""
    from tvm import relax

    followed = _followed.get()
    if followed is not None and not followed.looked_at:
        followed.looked_at = _computes_with_weights(module["main"], followed)
    return relax.transform.FoldConstant()(module)


def _computes_with_weights(function: Any, followed: Followed) -> bool:
    """Whether a call in a function reads constants alone, and a weight among them."""
    from tvm import relax
    from tvm.ir import GenericConst

    known: dict[Any, bool] = {}  # variables that depend on constants alone: whether on a weight

    def of(expression: Any) -> bool | None:
        """Whether a tensor depends on a weight; None if it depends on something else than constants."""
        if isinstance(expression, GenericConst):
            return followed.made(expression) is not None
        if isinstance(expression, relax.Var):
            return known.get(expression)
        if isinstance(expression, relax.Call):
            parts = [of(part) for part in expression.args]
        elif isinstance(expression, relax.Tuple):
            parts = [of(part) for part in expression.fields]
        elif isinstance(expression, relax.TupleGetItem):
            parts = [of(expression.tuple_value)]
        else:  # a function, a shape
            return False
        return None if None in parts else any(parts)

    found = False
    for block in function.body.blocks:
        for binding in block.bindings:
            constant = of(binding.value)
            if constant is not None:
                known[binding.var] = constant
                found |= constant and isinstance(binding.value, relax.Call)
    return found


def _view(constant: Any) -> Array:
    value = constant.value
    return value.numpy() if str(value.dtype).startswith(("bfloat", "float8")) else np.from_dlpack(value)
