"""Kernels that process an axis in order: running sums, and the greatest elements.

TVM has such kernels for graphics processors only, or calls a function of its runtime. A library without this runtime
does not have that function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xrlflow.backends.tvm.kernels.building import LOCAL, OPAQUE, SCHEDULED, number
from xrlflow.backends.tvm.toolchain.imported import Imported
from xrlflow.backends.tvm.toolchain.reading import known_value, sizes

_WORTH_A_THREAD = 30_000
# This many rows are summed at the same time, since each addition of a row waits for the addition before.
_ABREAST = 8
# The number of sums of neighbours in memory that are computed at the same time, and the number of lanes of their
# vectors (LLVM splits vectors that are longer than the machine's).
_NEIGHBOURS, _VECTOR = 64, 16
_INT64, _INT32, _LAST = "int64", "int32", 0x7FFFFFFF
_INFINITY = 0x7F800000  # the bits of a float


def running_sums(node: Imported) -> Any | None:
    """The kernel of CumSum along a constant axis; None for types that ONNX Runtime does not sum."""
    from tvm import relax

    x, axis = node.inputs[0], known_value(node.inputs[1])
    shape, kind = sizes(x), str(x.ty.dtype)
    if shape is None or axis is None or kind not in ("float32", "float64", "int32", "int64"):
        return None
    if 0 in shape:
        return x
    at = int(axis.item()) % len(shape)
    around = (math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :]))
    exclusive, reverse = (bool(node.attributes.get(name, 0)) for name in ("exclusive", "reverse"))
    function = node.builder.add_func(_sums(around, kind, exclusive, reverse), "cumsum")
    flat = node.emit(relax.op.reshape(x, around))
    result = node.emit(relax.call_tir(function, [flat], relax.TensorType(around, kind)))
    return node.emit(relax.op.reshape(result, shape))


def _sums(shape: tuple[int, int, int], kind: str, exclusive: bool, reverse: bool) -> Any:
    """The PrimFunc of running sums along the second of three dimensions."""
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    rows, length, inner = shape
    across = rows if inner == 1 else inner
    vector = _VECTOR if inner >= _VECTOR else 1
    width = min(_ABREAST if inner == 1 else _NEIGHBOURS, across) // vector * vector
    groups = -(-across // width)
    loop = T.parallel if math.prod(shape) >= _WORTH_A_THREAD else T.serial
    # The sum begins with minus zero, so that it keeps the sign of a first element that is minus zero.
    zero = tirx.const(-0.0 if kind.startswith("float") and not exclusive else 0, kind)

    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            x, out = (T.arg(name, T.buffer(shape, kind)) for name in ("x", "out"))
            tasks = loop(0, groups if inner == 1 else rows * groups)
            with T.sblock("root"), tasks as task, T.sblock("cumsum"):
                T.reads([])
                T.writes([])
                sums = T.alloc_buffer((width,), kind, scope=LOCAL)
                # If groups do not divide the extent, the last group overlaps the group before. Results that are
                # computed twice are equal.
                begin = tirx.Min(task % groups * width, number(across - width))

                def each(body: Callable[[Any, Any, Any], None], k: Any) -> None:
                    with T.unroll(0, width // vector) as part, T.vectorized(0, vector) as place:
                        lane = part * vector + place
                        at = (begin + lane, k, number(0)) if inner == 1 else (task // groups, k, begin + lane)
                        body(lane, at, sums[lane] + x[at])

                def step(lane: Any, at: Any, total: Any) -> None:
                    if exclusive:
                        T.buffer_store(out, sums[lane], list(at))
                        T.buffer_store(sums, sums[lane] + x[at], [lane])
                    else:
                        T.buffer_store(sums, total, [lane])
                        T.buffer_store(out, sums[lane], list(at))

                with T.serial(0, width) as lane:
                    T.buffer_store(sums, zero, [lane])
                with T.serial(0, length) as turn:
                    each(step, number(length - 1) - turn if reverse else turn)
        return builder.get()


def greatest(node: Imported) -> Any:
    """TopK: values and indices, in descending order (for the least elements in ascending order), also if no order is
    requested. Of equal elements, the element with the lowest index comes first, and NaN counts as greater than all
    numbers.

    Raises BackendError for types of other than 32 bits, and for a number of elements that is not constant.
    """
    from tvm import relax

    x, given = node.inputs[0], node.given(1)
    count = node.attributes.get("k") if given is None else known_value(given)
    shape, kind = sizes(x), str(x.ty.dtype)
    if count is None or shape is None:
        raise node.refused("of a number of elements that depends on values")
    if kind not in ("float32", "int32"):
        raise node.refused(f"of {kind}")
    k, at = int(count if given is None else count.item()), int(node.attributes.get("axis", -1)) % len(shape)
    if not 0 <= k <= shape[at]:
        raise node.refused(f"with {k} of {shape[at]} elements")
    out = (*shape[:at], k, *shape[at + 1 :])
    if 0 in out:
        parts = [node.emit(relax.op.zeros(out, each)) for each in (kind, _INT64)]
        return relax.Tuple(parts)
    around = (math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :]))
    largest = bool(node.attributes.get("largest", 1))
    function = node.builder.add_func(_Top(around, k, kind, largest).function(), "topk")
    flat, some = node.emit(relax.op.reshape(x, around)), (around[0], k, around[2])
    types = [relax.TensorType(some, each) for each in (kind, _INT64)]
    result = node.emit(relax.call_tir(function, [flat], types))
    parts = [node.emit(relax.TupleGetItem(result, part)) for part in (0, 1)]
    return relax.Tuple([node.emit(relax.op.reshape(part, out)) for part in parts])


class _Top:
    """Writes the PrimFunc of the `k` greatest (or least) elements along the second of three dimensions.

    Keys are integers with the same order as the elements. An entry is a key followed by the element's index, so that no
    two are equal. A heap has the best `k` entries so far, with the worst of them first: most elements are only compared
    with this worst entry.
    """

    def __init__(self, shape: tuple[int, int, int], k: int, kind: str, largest: bool) -> None:
        self._shape, self._k, self._kind, self._largest = shape, k, kind, largest
        self._heap: Any = None
        self._state: Any = None
        self._inserted: Any = None

    def function(self) -> Any:
        from tvm.script.ir_builder import IRBuilder
        from tvm.script.ir_builder import tirx as T

        (rows, length, inner), k = self._shape, self._k
        loop = T.parallel if math.prod(self._shape) >= _WORTH_A_THREAD else T.serial
        with IRBuilder() as builder:
            with T.prim_func(is_private=True, s_tir=True):
                T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
                x = T.arg("x", T.buffer(self._shape, self._kind))
                values = T.arg("values", T.buffer((rows, k, inner), self._kind))
                places = T.arg("places", T.buffer((rows, k, inner), _INT64))
                with T.sblock("root"), loop(0, rows * inner) as task, T.sblock("topk"):
                    T.reads([])
                    T.writes([])
                    keys = T.alloc_buffer((length,), _INT32)
                    self._heap = T.alloc_buffer((k + 1,), _INT64)  # `_sink` may read one entry after the last
                    self._state = T.alloc_buffer((3,), _INT32, scope=LOCAL)
                    self._inserted = T.alloc_buffer((1,), _INT64, scope=LOCAL)
                    row, column = task // inner, task % inner
                    with T.serial(0, length) as i:
                        T.buffer_store(keys, self._key(x[row, i, column]), [i])
                    self._select(keys)
                    with T.serial(0, k) as i:
                        T.buffer_store(self._state, self._index(self._heap[i]), [0])
                        T.buffer_store(values, x[row, self._state[0], column], [row, i, column])
                        T.buffer_store(places, self._state[0].astype(_INT64), [row, i, column])
            return builder.get()

    def _key(self, x: Any) -> Any:
        """The key of an element: an integer with the same order. For a float the key is its bits; if the float is
        negative, all bits but the sign are inverted. NaN has the greatest key (x86 sets the sign of results of invalid
        operations)."""
        from tvm import tirx

        key = x
        if self._kind == "float32":
            bits = tirx.reinterpret(
                _INT32, tirx.Select(x == tirx.const(0.0, self._kind), tirx.const(0.0, self._kind), x)
            )
            ordered = bits ^ ((bits >> number(31)) & number(_LAST))
            key = tirx.Select((bits & number(_LAST)) > number(_INFINITY), number(_LAST), ordered)
        return key if self._largest else key ^ number(-1)

    def _entry(self, key: Any, index: Any) -> Any:
        """A key and an index as one number. Of entries with equal keys, the entry with the lowest index is the
        greatest."""
        from tvm import tirx

        return (key.astype(_INT64) << tirx.const(32, _INT64)) + (number(_LAST) - index).astype(_INT64)

    def _index(self, entry: Any) -> Any:
        from tvm import tirx

        return number(_LAST) - (entry & tirx.const(_LAST, _INT64)).astype(_INT32)

    def _select(self, keys: Any) -> None:
        """Put the best of the keys into the heap, and sort it with the best first."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        heap, k, length = self._heap, self._k, self._shape[1]
        with T.serial(0, k) as i:
            T.buffer_store(heap, self._entry(keys[i], i), [i])
        T.buffer_store(heap, tirx.const(0, _INT64), [number(k)])
        if k > 1:
            with T.serial(0, k // 2) as turn:
                T.buffer_store(self._inserted, heap[number(k // 2 - 1) - turn], [0])
                self._sink(number(k // 2 - 1) - turn, number(k))
        if k < length:
            with T.serial(0, length - k) as turn:
                # A later element with the same key is not better, so only greater keys are.
                better = keys[turn + k] > (heap[0] >> tirx.const(32, _INT64)).astype(_INT32)
                with T.If(better), T.Then():
                    T.buffer_store(self._inserted, self._entry(keys[turn + k], turn + k), [0])
                    self._sink(number(0), number(k))
        if k > 1:
            with T.serial(0, k - 1) as turn:
                end = number(k - 1) - turn
                T.buffer_store(self._inserted, heap[end], [0])
                T.buffer_store(heap, heap[0], [end])
                self._sink(number(0), end)

    def _sink(self, start: Any, size: Any) -> None:
        """Insert the entry of the buffer `_inserted` into a heap of `size` entries whose entry at `start` is missing.
        It goes to `start` or further down."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        heap, held, state = self._heap, self._inserted, self._state
        T.buffer_store(state, start, [0])  # the free position
        T.buffer_store(state, start * 2 + 1, [1])  # the first position below it
        with T.While(state[1] < size):
            following = state[1] + 1
            second = tirx.And(following < size, heap[following] < heap[state[1]])
            T.buffer_store(state, tirx.Select(second, following, state[1]), [2])
            with T.If(heap[state[2]] < held[0]):
                with T.Then():
                    T.buffer_store(heap, heap[state[2]], [state[0]])
                    T.buffer_store(state, state[2], [0])
                    T.buffer_store(state, state[2] * 2 + 1, [1])
                with T.Else():
                    T.buffer_store(state, size, [1])
        T.buffer_store(heap, held[0], [state[0]])
