"""Rules that move Slice and Gather up through operators, towards the inputs, so that less is computed.

A *cut* takes some positions of a tensor: a classifier reads one row of the last layer, a decoder the last time step, a
crop the middle of an image. If a cut moves from after an operator to before it, the operator computes less; so do the
operators above it when the cut moves on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from rewrite_rules.axes import (
    axis_of,
    data_inputs,
    fronts,
    int_attr,
    ints_input,
    keeps_axes,
    own_axes,
    perm_of,
    rank_of,
    required,
    reshape_numbers,
    same_dims,
    slice_numbers,
)
from rewrite_rules.constants import slice_constant
from rewrite_rules.elementwise import made_by, read_once
from rewrite_rules.examples import graphs
from rewrite_rules.reshape import VIEWS
from rewrite_rules.slices import sizes_along
from xrlflow.ir import ABSENT, FLOATS, Attrs, Dim, Node, Value
from xrlflow.ops.axes import AXES, BROADCAST, REDUCTIONS, SOFTMAX, UNARY
from xrlflow.ops.packed import PRODUCT
from xrlflow.rewrite import Op, Reader, Refused, Region, RegionRule, Val, profitable, require

# An end larger than any dimension.
_END = 2**63 - 1
# Stands for the size of a cut dimension if this size is not known.
_LEFT = "what is left"


# Cuts


@dataclass(frozen=True, slots=True)
class Span:
    """Positions along an axis: from `start` to `stop` by `step`, as in a Slice, or the `listed` positions."""

    start: int = 0
    stop: int = 0
    step: int = 1
    listed: tuple[int, ...] | None = None

    @property
    def is_run(self) -> bool:
        """Whether the positions are consecutive, and counted from the front."""
        return self.listed is None and self.step == 1 and 0 <= self.start < self.stop

    def length(self, size: Dim) -> int | None:
        """How many of these positions an axis of this size has; None if that is not known."""
        if self.listed is not None:
            return len(self.listed)
        if not isinstance(size, int):
            return None
        return len(range(*slice(self.start, self.stop, self.step).indices(size)))

    def is_all(self, size: Dim) -> bool:
        """Whether these are all positions of an axis of this size, in order."""
        if self.listed is not None or (self.start, self.step) != (0, 1):
            return False
        return self.stop == _END or (isinstance(size, int) and self.stop >= size)


# Axis and positions.
AxisSpan = tuple[int, Span]


@dataclass(frozen=True, slots=True)
class Cut:
    """A Slice, Gather or Split with constant numbers, and the positions that it takes from its input.

    `dropped` is the axis that a Gather of one number removes. `sizes` are the sizes of a Split's parts from the first
    to the last part that is read; `outputs` are the parts that are read.
    """

    node: Node
    spans: tuple[AxisSpan, ...]
    outputs: tuple[Value, ...]
    dropped: int | None = None
    sizes: tuple[int, ...] = ()
    first: int = 0


_CUTS = ("Slice", "Gather", "Split")


def find_cut(reader: Reader, node: Node) -> Cut | None:
    """A Slice, Gather or Split as a Cut; None if it takes all positions or none. Refuses unknown numbers."""
    shape = reader.type(node.inputs[0]).shape
    if not shape:
        return None
    if node.op == "Split":
        return _find_split(reader, node, shape)
    if node.op == "Gather":
        axis = axis_of(node, len(shape))
        index = reader.val(node.inputs[1])
        if index.array.ndim > 1 or not index.ints:
            return None
        span = _of_indices(index.ints, shape[axis])
        if span is None:
            return None
        return Cut(node, ((axis, span),), node.outputs, None if index.array.ndim else axis)
    spans = []
    for axis, start, stop, step in sorted(slice_numbers(reader, node, len(shape))):
        size = shape[axis]
        if isinstance(size, int) and step > 0:
            start, stop, _ = slice(start, stop, step).indices(size)
            stop = max(start, stop)
        span = Span(start, stop, step)
        if span.length(size) == 0:
            return None  # many operators have no kernel for empty tensors
        if not span.is_all(size):
            spans.append((axis, span))
    return Cut(node, tuple(spans), node.outputs) if spans else None


def _of_indices(numbers: Sequence[int], size: Dim) -> Span | None:
    """The positions that a Gather takes; None if they are all positions, or out of range.

    For an axis of unknown size they stay a list: a Slice might yield fewer positions, a Gather does not.
    """
    if isinstance(size, int):
        numbers = [i + size if i < 0 else i for i in numbers]
        if min(numbers) < 0 or max(numbers) >= size:
            return None
        if all(b == a + 1 for a, b in pairwise(numbers)):
            span = Span(numbers[0], numbers[-1] + 1)
            return None if span.is_all(size) else span
    return Span(listed=tuple(numbers))


def _find_split(reader: Reader, node: Node, shape: Sequence[Dim]) -> Cut | None:
    """A Split as a cut: it takes the run of parts from the first to the last part that is read."""
    read_parts = [k for k, v in enumerate(node.outputs) if reader.count_users(v) or reader.is_output(v)]
    if not read_parts or (read_parts[0] == 0 and read_parts[-1] == len(node.outputs) - 1):
        return None
    axis = axis_of(node, len(shape))
    sizes = required(sizes_along(reader, node.outputs, axis), "a part's size is not known")
    first, last = read_parts[0], read_parts[-1] + 1
    span = Span(sum(sizes[:first]), sum(sizes[:last]))
    profitable(span.stop > span.start, "the parts are empty")
    outputs = tuple(node.outputs[k] for k in read_parts)
    return Cut(node, ((axis, span),), outputs, sizes=tuple(sizes[first:last]), first=first)


def _find_cuts(reader: Reader, node: Node) -> list[Cut] | None:
    """The cuts that read a node's input, if all readers of this input are cuts and the node is the first of them; else
    None.
    """
    value = node.inputs[0]
    own = find_cut(reader, node)
    if own is None:
        return None
    profitable(not reader.is_output(value), "all of it is given out")
    users = reader.users(value)
    if len(users) == 1:
        return [own]
    if min(u.id for u in users) != node.id:
        return None
    cuts = [find_cut(reader, u) if u.op in _CUTS and u.inputs[0] == value else None for u in users]
    profitable(all(c is not None for c in cuts), "all of it is read elsewhere")
    return [c for c in cuts if c is not None]


def _together(cuts: Sequence[Cut], shape: Sequence[Dim]) -> tuple[AxisSpan, ...]:
    """For each axis that every cut shortens, the smallest run of positions that contains the positions of all cuts."""
    out = []
    for axis in sorted(set.intersection(*({a for a, _ in c.spans} for c in cuts))):
        spans = [dict(c.spans)[axis] for c in cuts]
        if all(s == spans[0] for s in spans):
            out.append((axis, spans[0]))
            continue
        runs = [Span(min(s.listed), max(s.listed) + 1) if s.listed else s for s in spans]
        hull = Span(min(s.start for s in runs), max(s.stop for s in runs))
        if isinstance(shape[axis], int) and all(s.is_run for s in runs) and not hull.is_all(shape[axis]):
            out.append((axis, hull))
    return tuple(out)


def _within(span: Span, hull: Span) -> Span | None:
    """Positions relative to the start of a run that contains them; None if they are the whole run."""
    if span == hull:
        return None
    if span.listed is not None:
        return Span(listed=tuple(i - hull.start for i in span.listed))
    return Span(span.start - hull.start, span.stop - hull.start)


def take(op: Op, x: Val, spans: Sequence[AxisSpan]) -> Any:
    """Take positions of x: by one Gather for each axis with listed positions, and by one Slice for all other axes."""
    for axis, span in spans:
        if span.listed is not None:
            x = op.Gather(x, list(span.listed), axis=axis)
    runs = [t for t in spans if t[1].listed is None]
    if not runs:
        return x
    if x.const and len(runs) == 1 and runs[0][1].is_run and isinstance(x.shape[runs[0][0]], int):
        axis, run = runs[0]
        return slice_constant(op, x, axis, run.start, min(run.stop, x.size(axis)))
    steps = [s.step for _, s in runs]
    numbers = [[s.start for _, s in runs], [s.stop for _, s in runs], [a for a, _ in runs]]
    return op.Slice(x, *numbers) if set(steps) == {1} else op.Slice(x, *numbers, steps)


# Through a reshape


def _size_before(dims: Sequence[Dim]) -> tuple[int, Counter[str]] | None:
    """A product of dimensions, as a number and counted symbols; None if a dimension is not known."""
    number, names = 1, Counter[str]()
    for dim in dims:
        if dim is None:
            return None
        if isinstance(dim, int):
            number *= dim
        else:
            names[dim] += 1
    return number, names


def _through_view(before: Sequence[Dim], after: Sequence[Dim], axis: int) -> int:
    """The dimension before a reshape that is dimension `axis` after it. Refuses if no dimension stays whole as this
    one.
    """
    own = _size_before(after[:axis])
    profitable(own is not None and after[axis] is not None, "a dimension is not known")
    profitable(after[axis] != 1, "there is only one position")
    for i, dim in enumerate(before):
        if dim == after[axis] and _size_before(before[:i]) == own:
            return i
    raise Refused("the reshape does not keep the dimension whole")


@dataclass(frozen=True, slots=True)
class _Finish:
    """What remains of one cut after the common run was taken: positions within the run, an axis to drop, parts to split
    into.
    """

    spans: tuple[AxisSpan, ...]
    dropped: int | None
    axis: int
    sizes: tuple[int, ...]
    selected: tuple[int, ...]

    @staticmethod
    def of(cut: Cut, passed: dict[int, Span]) -> _Finish:
        spans: list[AxisSpan] = []
        for axis, span in cut.spans:
            within = _within(span, passed[axis]) if axis in passed else span
            if within is not None:
                spans.append((axis, within))
        selected = tuple(cut.node.outputs.index(v) - cut.first for v in cut.outputs) if cut.sizes else ()
        return _Finish(tuple(spans), cut.dropped, cut.spans[0][0], cut.sizes, selected)

    def build(self, op: Op, y: Val) -> list[Any]:
        y = take(op, y, self.spans)
        if self.dropped is not None:
            return [op.Squeeze(y, [self.dropped])]
        if len(self.sizes) > 1:
            parts = op.Split(y, axis=self.axis, sizes=list(self.sizes))
            return [parts[k] for k in self.selected]
        return [y]


def _cut_dims(shape: Sequence[Dim], spans: Sequence[AxisSpan]) -> tuple[Dim, ...]:
    """A shape after a cut, with _LEFT for a size that is not known (there is at most one)."""
    out = list(shape)
    for axis, span in spans:
        length = span.length(shape[axis])
        require(length is not None or _LEFT not in out, "what is left of two dimensions is not known")
        out[axis] = _LEFT if length is None else length
    return tuple(out)


# The rules

# The reason why mutants that cut everything away pass: no test runs ONNX Runtime on empty tensors.
_NOTHING = "the runtime is not asked to compute empty tensors: some of its kernels crash"


@dataclass(frozen=True, slots=True)
class InputCuts:
    """How a cut passes an operator: the positions to take of each of its first inputs (None: all), and further
    changes.
    """

    inputs: tuple[AxisSpan | None, ...]
    extra: Any = None


@dataclass(frozen=True, slots=True)
class _Plan:
    op: str
    attrs: Attrs
    inputs: tuple[tuple[AxisSpan, ...], ...]
    extra: tuple[tuple[int, Any], ...]  # by axis of the operator's result
    shape: tuple[int, ...] | None  # the shape of a Reshape that follows
    cuts: tuple[_Finish, ...]


class _PushSlice(RegionRule, family="demand"):
    """A rule that moves a cut from after an operator to before it.

    A cut is a Slice, a Gather by constants, or a Split with parts that nobody reads. A reshape may stand between the
    operator and the cut, as long as the cut dimension stays whole. If only cuts read the operator's result, one cut
    before the operator takes the run of positions that contains those of all cuts. Axes along which a cut cannot pass
    are cut after the operator.
    """

    anchors = _CUTS
    operators: ClassVar[frozenset[str]] = frozenset()
    # Operators that ONNX Runtime refuses to compute on empty tensors.
    needs_some: ClassVar[frozenset[str]] = frozenset()

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        """How a cut of a node's result passes the node. By default it follows the axes of the node. Refuses by
        `require`.
        """
        return _same(span, *_axes_read(reader, node, axis))

    def rebuild(self, op: Op, plan: _Plan, inputs: Sequence[Val | None]) -> Any:
        return op[plan.op](*inputs, attrs=plan.attrs)

    def find(self, reader: Reader, node: Node) -> Region | None:
        value = top = node.inputs[0]
        inner = made_by(reader, value, *self.operators, *VIEWS)
        if inner is None:
            return None
        cuts = _find_cuts(reader, node)
        if cuts is None:
            return None
        nodes = [c.node for c in cuts]
        while inner.op not in self.operators:
            nodes.append(inner)
            top = inner.inputs[0]
            inner = made_by(reader, top, *self.operators, *VIEWS)
            if inner is None or len(cuts) > 1:
                return None
            profitable(read_once(reader, top), "all of it is read elsewhere")
        profitable(len(inner.outputs) == 1, "it has another output")
        before = reader.val(top).shape
        after = reader.val(value).shape
        # The axes along which the cut passes, and the corresponding axes of the operator's result.
        passing: dict[int, tuple[int, Span, InputCuts]] = {}
        refused: Refused | None = None
        for axis, span in _together(cuts, after):
            try:
                at = axis if top == value else _through_view(before, after, axis)
                some = span.length(after[axis]) is not None
                require(some or inner.op not in self.needs_some, "there may be nothing left")
                passing[axis] = (at, span, self.input_cuts(reader, inner, at, span))
            except Refused as reason:
                refused = reason
        if refused is not None and not passing:
            raise refused
        profitable(passing, "together they read all of it")
        for axis, (_, span, _) in passing.items():
            length, size = span.length(after[axis]), after[axis]
            profitable(length is None or not isinstance(size, int) or length < size, "nothing is left out")
        passed = {axis: span for axis, (_, span, _) in passing.items()}
        shape = None
        if top != value:
            old = _cut_dims(before, [(at, span) for at, span, _ in passing.values()])
            new = _cut_dims(after, list(passed.items()))
            if not same_dims(old, new):
                shape = tuple(reshape_numbers(old, new))
        columns: list[list[AxisSpan]] = [[] for _ in inner.inputs]
        for _, _, cuts_of in passing.values():
            for column, own_span in zip(columns, cuts_of.inputs):
                column += () if own_span is None else (own_span,)
        plan = _Plan(
            inner.op,
            inner.attrs,
            tuple(tuple(c) for c in columns),
            tuple((at, cuts_of.extra) for at, _, cuts_of in passing.values()),
            shape,
            tuple(_Finish.of(c, passed) for c in cuts),
        )
        outputs = tuple(v for c in cuts for v in c.outputs)
        return Region(outputs, inner.inputs, (*nodes, inner), plan)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        plan: _Plan = region.data
        cut = [None if x is None else take(op, x, spans) for x, spans in zip(inputs, plan.inputs)]
        y = self.rebuild(op, plan, cut)
        if plan.shape is not None:
            y = op.Reshape(y, list(plan.shape))
        return [v for finish in plan.cuts for v in finish.build(op, y)]


def _above(*operators: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """The operators that a rule looks for above a cut: its own operators, or a reshape of their results."""
    return frozenset(operators), tuple(dict.fromkeys((*operators, *VIEWS)))


def _same(span: Span, *axes: int | None) -> InputCuts:
    """How a cut passes if the same positions of each input are taken, along the given axis of each input (None: not
    cut).
    """
    return InputCuts(tuple(None if a is None else (a, span) for a in axes))


def _aligned(reader: Reader, values: Sequence[Value], axis: int, rank: int) -> list[int | None]:
    """For each operand, the axis that broadcasting aligns with `axis` of the common shape; None if the operand is
    repeated.
    """
    axes: list[int | None] = []
    dims: list[Dim] = []
    for v in values:
        shape = () if v == ABSENT else reader.val(v).shape
        at = axis - (rank - len(shape))
        axes.append(at if at >= 0 else None)
        dims.append(shape[at] if at >= 0 else 1)
    wide = [d for d in dims if d != 1]
    if wide:
        require(len(wide) == 1 or (None not in wide and len(set(wide)) == 1), "an operand may be repeated")
        return [a if d != 1 else None for a, d in zip(axes, dims)]
    return axes


def _repeated(reader: Reader, operand: Value, axis: int, rank: int, size: Dim) -> int | None:
    """The axis of an operand that aligns with `axis` of `rank`; None if the operand is repeated along this axis.
    `size`: the number of positions.
    """
    shape = () if operand == ABSENT else reader.val(operand).shape
    at = axis - (rank - len(shape))
    if at < 0 or shape[at] == 1:
        return None
    once = isinstance(shape[at], int) or (shape[at] is not None and shape[at] == size)
    require(once, "an operand may be repeated")
    return at


def _axes_read(reader: Reader, node: Node, axis: int) -> list[int | None]:
    """For each input, the axis that becomes `axis` of a node's result (None: none). Refuses an axis whose positions
    interact.
    """
    axes, own = AXES[node.op], own_axes(reader, node)
    if keeps_axes(node):
        together = axis >= own[0] if axes.onwards else axis in own
        require(not together, f"it is {axes.does} along this axis")
    else:
        axis = [i for i in range(rank_of(reader, node.inputs[0])) if i not in own][axis]
    if axes.of == "broadcast":
        return _aligned(reader, node.inputs, axis, rank_of(reader, node.outputs[0]))
    return [axis] * len(data_inputs(node)[0])


class _PushSliceThroughParts(_PushSlice):
    """A rule for several operators, each of which has a rule object of its own (`_part`)."""

    parts: ClassVar[tuple[_PushSlice, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.operators = frozenset[str]().union(*(p.operators for p in cls.parts))
        cls.needs_some = frozenset[str]().union(*(p.needs_some for p in cls.parts))
        cls.reads_from = tuple(dict.fromkeys((*sorted(cls.operators), *VIEWS)))

    def _part(self, op: str) -> _PushSlice:
        return next(p for p in self.parts if op in p.operators)

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        return self._part(node.op).input_cuts(reader, node, axis, span)

    def rebuild(self, op: Op, plan: _Plan, inputs: Sequence[Val | None]) -> Any:
        return self._part(plan.op).rebuild(op, plan, inputs)


class PushSliceThroughUnary(_PushSlice):
    """slice(f(x)) -> f(slice(x))  for f element by element, of one input;  Gather alike."""

    may_lose_errors = ("sizes",)
    operators, reads_from = _above(*UNARY)
    examples = graphs(
        "(float[N,6] x) => (float[N] y) { a = Relu(x) y = Gather<axis=1>(a, 0) }",
        "(float[N,2,6] x) => (float[N,2,2] y) { a = Tanh(x) y = Slice(a, [1], [3], [2]) }",
        "(float[2,6] x) => (float[1,2,3] y) { a = Exp(x) b = Reshape(a, [2, 2, 3]) y = Slice(b, [0], [1], [0]) }",
        "(float[5,4] x) => (float[1,4] y, float[2,4] z) "
        "{ a = Sigmoid(x) y = Slice(a, [1], [2], [0]) z = Slice(a, [2], [4], [0]) }",
        "(float[6,2] x) => (float[2,2] y, float[1,2] z) { a = Erf(x) b, y, z, c = Split<axis=0>(a, [1, 2, 1, 2]) }",
        "(float[N,4,5] x) => (float[N,2,5] y) { a = Abs(x) y = Gather<axis=1>(a, [3, 0]) }",
        "(float[5,4] x) => (float[2,4] y) { a = Clip(x, -0.5, 0.5) y = Slice(a, [1], [3], [0]) }",
        "(float[6,4] x) => (float[2,2,2] y) "
        "{ a = Exp(x) b = Reshape(a, [6, 4, 1]) c = Reshape(b, [6, 2, 2]) y = Slice(c, [1], [3], [0]) }",
    )
    near_misses = graphs(
        "(float[2,6] x) => (float[1,2,3] y, float[1,2,3] z) "
        "{ a = Exp(x) b = Reshape(a, [2, 2, 3]) y = Slice(b, [0], [1], [0]) z = Slice(b, [1], [2], [0]) }",
        "(float[4,6] x) => (float[2,12] y) { a = Softmax(x) b = Reshape(a, [4, 6, 1]) y = Slice(b, [1], [3], [0]) }",
        "(int64[5] x) => (int64[2] y, int64[5,4] z) "
        "{ a = Abs(x) y = Slice(a, [1], [3], [0]) z = OneHot(a, [4], [0, 1]) }",
        "(float[6,2] x) => (float[0,2] y) { a = Erf(x) y, z = Split<axis=0>(a, [0, 6]) }",
    )


class PushSliceThroughBroadcast(_PushSlice):
    """slice(f(x, y)) -> f(slice(x), slice(y))  for f element by element;  operands repeated along the axis stay."""

    operators, reads_from = _above(*BROADCAST)
    examples = graphs(
        "(float[N,S,4] x, float[N,S,4] z) => (float[N,4] y) { a = Add(x, z) y = Gather<axis=1>(a, 0) }",
        "(float[2,6,4] x, float[6,1] z) => (float[2,2,4] y) { a = Mul(x, z) y = Slice(a, [1], [3], [1]) }",
        "(float[N,6] x, float[N,6] z) => (float[N,4] y) { a = Sum(x, 0.5, z) y = Slice(a, [1], [5], [1]) }",
        "(bool[1,6] c, float[4,1] x, float[6] z) => (float[2,2] y) { a = Where(c, x, z) y = Slice(a, [1, 1], [3, 3]) }",
    )


class PushSliceThroughNormalization(_PushSlice):
    """slice(normalization(x)) -> normalization(slice(x))  along a dimension that is not normalised.

    The normalisation may be a LayerNormalization, RMSNormalization, LpNormalization, BatchNormalization or
    InstanceNormalization. A cut along the channels cuts the statistics, too.
    """

    operators, reads_from = _above(
        *("LayerNormalization", "RMSNormalization", "LpNormalization"),
        *("BatchNormalization", "InstanceNormalization"),
    )
    examples = graphs(
        "(float[N,S,4] x, float[4] s, float[4] b) => (float[N,4] y) "
        "{ a = LayerNormalization(x, s, b) y = Gather<axis=1>(a, 0) }",
        "(float[N,5,2,3] x, float[2,3] s) => (float[N,2,2,3] y) "
        "{ a = LayerNormalization<axis=2>(x, s) y = Slice(a, [1], [3], [1]) }",
        "(float[N,5,4] x, float[4] s) => (float[N,2,4] y) { a = RMSNormalization(x, s) y = Slice(a, [1], [3], [1]) }",
        "(float[N,5,4] x) => (float[N,2,4] y) { a = LpNormalization<axis=2>(x) y = Slice(a, [1], [3], [1]) }",
        "(float[N,3,5,4] x, float[3] s, float[3] b, float[3] m) => (float[N,3,2,4] y) "
        "{ a = BatchNormalization(x, s, b, m, [1.0, 2.0, 3.0]) y = Slice(a, [1], [3], [2]) }",
        "(float[N,3,5] x, float[3] s, float[3] b, float[3] m) => (float[N,2,5] y) "
        "{ a = BatchNormalization(x, s, b, m, [1.0, 2.0, 3.0]) y = Slice(a, [1], [3], [1]) }",
        "(float[N,3,5] x, float[3] s, float[3] b) => (float[N,2,5] y) "
        "{ a = InstanceNormalization(x, s, b) y = Slice(a, [1], [3], [1]) }",
    )

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        if node.op in AXES:
            return super().input_cuts(reader, node, axis, span)
        profitable(not node.attrs.get("training_mode"), "it is in training, and has other outputs")
        if node.op == "InstanceNormalization":
            require(axis < 2, "it is normalised along this axis")
        if axis != 1:
            return _same(span, axis)
        channels = {(reader.type(v).shape or (None, None))[min(i, 1) ^ 1] for i, v in enumerate(node.inputs)}
        require(len(channels) == 1 and None not in channels, "how many channels there are is not known")
        return _same(span, 1, *(0 for _ in node.inputs[1:]))


class PushSliceIntoMatMul(_PushSlice):
    """slice(x @ w) -> slice(x) @ w  for rows,  x @ slice(w)  for columns,  both  for other dimensions."""

    may_lose_errors = ("sizes",)
    operators, reads_from = _above("MatMul")
    examples = graphs(
        "(float[N,S,4] x, float[4,3] w) => (float[N,3] y) { a = MatMul(x, w) y = Gather<axis=1>(a, 0) }",
        "(float[N,2,5,4] x, float[N,2,4,3] z) => (float[N,2,1,3] y) { a = MatMul(x, z) y = Slice(a, [4], [5], [2]) }",
        "(float[2,4] x, float[3,4,5] z) => (float[1,2,3] y) { a = MatMul(x, z) y = Slice(a, [1, 1], [2, 4], [0, 2]) }",
        "(float[1,5,4] x, float[4,6] w) => (float[1,2,3] y) "
        "{ a = MatMul(x, w) b = Reshape(a, [5, 2, 3]) c = Gather(b, 4) y = Unsqueeze(c, [0]) }",
        "(float[N,4] x, float[4,6] w) => (float[N,2] y, float[N,1] z) "
        "{ a = MatMul(x, w) b, y, z, c = Split<axis=1>(a, [1, 2, 1, 2]) }",
    )
    near_misses = graphs(
        "(float[5,6,4] x, float[4] w) => (float[2,6] y) { a = MatMul(x, w) y = Slice(a, [1], [3], [0]) }",
    )

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        x, w = node.inputs
        rank, rows, columns = (rank_of(reader, v) for v in (node.outputs[0], x, w))
        require(min(rows, columns) >= 2, "an operand is a vector")
        if axis == rank - 2:
            return _same(span, rows - 2, None)
        if axis == rank - 1:
            return _same(span, None, columns - 1)
        return _same(span, *_aligned(reader, (x, w), axis, rank))


class PushSliceIntoPackedMatMul(_PushSlice):
    """slice(matmulnbits(x, w)) -> matmulnbits(slice(x), w)  for rows."""

    backend = "onnxruntime"
    may_lose_errors = ("sizes",)
    operators, reads_from = _above(PRODUCT)
    dtypes = FLOATS
    examples = graphs(
        *(
            "(float[N,5,16] x, uint8[3,1,8] w, float[3] s) => (y) "
            f"{{ a = com.microsoft.MatMulNBits<K=16, N=3, bits=4, block_size=16>(x, w, s) y = {cut} }}"
            for cut in ("Gather<axis=1>(a, 4)", "Slice(a, [1], [3], [1])")
        ),
        "(float[5,16] x, uint8[4,1,16] w, float[4] s, uint8[4] z, float[4] b) => (float[2] y) "
        "{ a = com.microsoft.MatMulNBits<K=16, N=4, bits=8, block_size=16>(x, w, s, z, , b) "
        "r = Reshape(a, [5, 2, 2]) c = Gather(r, -1) y = Gather(c, 1) }",
    )
    near_misses = graphs(
        "(float[N,5,16] x, uint8[4,1,8] w, float[4] s) => (y) "
        "{ a = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, w, s) y = Slice(a, [1], [3], [2]) }",
    )

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        rank = rank_of(reader, node.outputs[0], node.inputs[0])
        require(axis != rank - 1, "it cuts the columns")
        return _same(span, axis, *(None for _ in node.inputs[1:]))


class PushSliceIntoGemm(_PushSlice):
    """slice(gemm(x, w, b)) -> gemm(slice(x), w, b)  for rows,  gemm(x, slice(w), slice(b))  for columns."""

    may_lose_errors = ("sizes",)
    operators, reads_from = _above("Gemm")
    dtypes = FLOATS
    examples = graphs(
        "(float[N,4] x, float[3,4] w, float[3] b) => (float[3] y) { a = Gemm<transB=1>(x, w, b) y = Gather(a, 0) }",
        "(float[4,5] x, float[4,3] w, float[5,1] b) => (float[2,3] y) "
        "{ a = Gemm<transA=1, alpha=0.5>(x, w, b) y = Slice(a, [1], [3], [0]) }",
        "(float[N,4] x, float[4,6] w, float[6] b) => (float[N,2] y) { a = Gemm(x, w, b) y = Slice(a, [1], [3], [1]) }",
        "(float[5,4] x, float[4,6] w) => (float[6] y) "
        "{ a = Gemm(x, w) b = Reshape(a, [1, 5, 6]) c = Gather<axis=1>(b, -1) y = Squeeze(c, [0]) }",
    )
    near_misses = graphs(
        "(float[N,4] x, float[4,6] w, float[M] b) => (float[N,2] y) { a = Gemm(x, w, b) y = Slice(a, [1], [3], [1]) }",
    )

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        rows, columns = int_attr(node, "transA", 0), 1 - int_attr(node, "transB", 0)
        first = (rows, None) if axis == 0 else (None, columns)
        size = reader.val(node.outputs[0]).shape[axis]
        return _same(span, *first, *(_repeated(reader, b, axis, 2, size) for b in node.inputs[2:]))


class PushSliceIntoAttention(_PushSlice):
    """slice(attention(q, k, v, mask)) -> attention(slice(q), k, v, slice(mask))  for rows that are not causal.

    For a cut along batch or heads all inputs are cut; for a cut along the features of the result only the values are.
    """

    may_lose_errors = ("sizes",)
    operators, reads_from = _above("Attention")
    needs_some = operators
    dtypes = FLOATS
    examples = graphs(
        "(float[N,2,5,4] q, float[N,2,3,4] k, float[N,2,3,4] v, float[1,1,5,3] m) => (float[N,2,1,4] y) "
        "{ a = Attention(q, k, v, m) y = Slice(a, [0], [1], [2]) }",
        "(float[N,5,8] q, float[N,3,8] k, float[N,3,4] v) => (float[N,4] y) "
        "{ a = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v) y = Gather<axis=1>(a, 4) }",
        "(float[2,4,5,4] q, float[2,4,3,4] k, float[2,4,3,6] v) => (float[2,2,5,6] y) "
        "{ a = Attention(q, k, v) y = Slice(a, [1], [3], [1]) }",
        "(float[2,4,5,4] q, float[2,4,3,4] k, float[2,4,3,6] v, float[2,4,5,3] m) => (float[2,2,5,6] y) "
        "{ a = Attention(q, k, v, m) y = Slice(a, [1], [3], [1]) }",
    )
    near_misses = graphs(
        "(float[N,2,5,4] q, float[N,2,3,4] k, float[N,2,3,4] v, float[1,1,L,3] m) => (float[N,2,1,4] y) "
        "{ a = Attention(q, k, v, m) y = Slice(a, [2], [3], [2]) }",
        "(float[N,2,5,4] q, float[N,2,5,4] k, float[N,2,5,4] v) => (float[N,2,1,4] y) "
        "{ a = Attention<is_causal=1>(q, k, v) y = Slice(a, [2], [3], [2]) }",
        "(float[2,4,5,4] q, float[2,2,3,4] k, float[2,2,3,6] v) => (float[2,2,5,6] y) "
        "{ a = Attention(q, k, v) y = Slice(a, [0], [2], [1]) }",
        "(float[N,5,8] q, float[N,3,8] k, float[N,3,4] v) => (float[N,5,2] y) "
        "{ a = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v) y = Slice(a, [0], [2], [2]) }",
        "(float[2,4,5,4] q, float[2,4,3,4] k, float[2,4,3,6] v, float[2,4,2,4] s, float[2,4,2,6] t) "
        "=> (float[2,2,5,6] y) { a, b, c = Attention(q, k, v, , s, t) y = Slice(a, [1], [3], [1]) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {"drop: there may be nothing left": _NOTHING}

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        q, k, v, *more = node.inputs
        masks = [x for x in more if x != ABSENT]
        rank = rank_of(reader, q)
        mask = more[0] if more else ABSENT
        batches = {(reader.type(x).shape or (None,))[0] for x in (q, k, v)}
        profitable(len(batches) == 1 and None not in batches, "how many sequences there are is not known")
        if axis == rank - 1:
            require(rank == 4, "the heads lie side by side")
            profitable(len(masks) <= (mask != ABSENT), "there are past values")
            return _same(span, None, None, 3)
        if axis == (2 if rank == 4 else 1):
            require(not node.attrs.get("is_causal"), "each row sees others")
            return _same(span, axis, None, None, _repeated(reader, mask, 2, 4, reader.val(q).shape[axis]))
        profitable(len(masks) <= (mask != ABSENT), "there are past keys")
        if axis == 1:
            heads = {reader.val(x).shape[1] for x in (q, k, v)}
            require(len(heads) == 1 and None not in heads, "heads share keys")
        cut = _repeated(reader, mask, axis, 4, reader.val(q).shape[axis])
        return _same(span, axis, axis, axis, cut)


class PushSliceThroughTranspose(_PushSlice):
    """slice(transpose(x)) -> transpose(slice(x))."""

    operators, reads_from = _above("Transpose")
    examples = graphs(
        "(float[N,2,5,4] x) => (float[N,2,4] y) { a = Transpose<perm=[0,2,1,3]>(x) y = Gather<axis=1>(a, 0) }",
        "(float[1,2,S,4] x) => (float[1,8] y) "
        "{ a = Transpose<perm=[0,2,1,3]>(x) b = Reshape(a, [1, -1, 8]) y = Gather<axis=1>(b, 0) }",
        "(float[3,4,5] x) => (float[2,1,3] y) { a = Transpose(x) y = Slice(a, [1, 2], [3, 3]) }",
    )

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        return _same(span, perm_of(node, rank_of(reader, node.inputs[0]))[axis])


class PushSliceThroughReshape(RegionRule, family="demand"):
    """slice(reshape(x)) -> reshape(slice(x))  along a dimension that stays whole;  the other views alike."""

    may_lose_errors = ("sizes",)
    anchors = ("Slice", "Gather")
    reads_from = VIEWS
    examples = graphs(
        "(float[N,S,6] x) => (float[N,2,3] y) { a = Reshape(x, [0, 0, 2, 3]) y = Gather<axis=1>(a, 0) }",
        "(float[1,5,6] x) => (float[2,6] y) { a = Reshape(x, [5, 6]) y = Slice(a, [1], [3], [0]) }",
        "(float[N,6] x) => (float[N,1,2] y) { a = Unsqueeze(x, [1]) y = Slice(a, [1], [3], [2]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        view = made_by(reader, node.inputs[0], *VIEWS)
        if view is None:
            return None
        cut = find_cut(reader, node)
        if cut is None:
            return None
        profitable(read_once(reader, node.inputs[0]), "all of it is read elsewhere")
        before = reader.val(view.inputs[0]).shape
        after = reader.val(node.inputs[0]).shape
        spans = tuple((_through_view(before, after, axis), span) for axis, span in cut.spans)
        new = _cut_dims(after, cut.spans)
        if cut.dropped is not None:
            new = (*new[: cut.dropped], *new[cut.dropped + 1 :])
        numbers = tuple(reshape_numbers(_cut_dims(before, spans), new))
        return Region(node.outputs, view.inputs[:1], (node, view), (spans, numbers))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        spans, numbers = region.data
        return op.Reshape(take(op, x, spans), list(numbers))


class PushSliceThroughReduction(_PushSlice):
    """slice(reduce(x)) -> reduce(slice(x))  along a dimension that is not reduced;  Softmax and its like."""

    survivors: ClassVar[Mapping[str, str]] = {"drop: there may be nothing left": _NOTHING}
    operators, reads_from = _above(*REDUCTIONS, "ArgMax", "ArgMin", *SOFTMAX)
    needs_some = operators.difference(SOFTMAX)
    examples = graphs(
        "(float[N,5,4] x) => (float[N] y) { a = ReduceMean<keepdims=0>(x, [2]) y = Gather<axis=1>(a, 0) }",
        "(float[3,5,4] x) => (float[1,1,4] y) { a = ReduceSum(x, [1]) y = Slice(a, [1], [2], [0]) }",
        "(float[3,5,4] x) => (float[2] y) { a = ReduceMax<keepdims=0>(x, [0, 2]) y = Slice(a, [1], [3], [0]) }",
        "(float[N,2,5,4] x) => (float[N,2,1,4] y) { a = Softmax(x) y = Slice(a, [0], [1], [2]) }",
        "(float[5,N] x) => (float[N] y) { a = LogSoftmax<axis=1>(x) y = Gather(a, -1) }",
        "(float[5,4] x) => (float[5,2] y) { a = Softmax<axis=0>(x) y = Slice(a, [1], [3], [1]) }",
    )


class _ThroughConcat(_PushSlice):
    """slice(concat(x, y)) -> concat(slice(x), slice(y))  along another axis than the concat's."""

    operators, reads_from = _above("Concat")


class _IntoGather(_PushSlice):
    """slice(gather(x, i)) -> gather(x, slice(i))  along the indices' dimensions,  gather(slice(x), i)  along others."""

    operators, reads_from = _above("Gather")

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        data, index = node.inputs
        own, width = axis_of(node, rank_of(reader, data)), rank_of(reader, index)
        if own <= axis < own + width:
            return _same(span, None, axis - own)
        return _same(span, axis if axis < own else axis - width + 1, None)


class _ThroughExpand(_PushSlice):
    """slice(expand(x, s)) -> expand(slice(x), s'),  or  expand(x, s')  along a dimension that Expand makes."""

    operators, reads_from = _above("Expand")

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        x, shape = reader.val(node.inputs[0]).shape, reader.val(node.inputs[1]).ints
        out = reader.val(node.outputs[0]).shape
        own, index = axis - (len(out) - len(x)), axis - (len(out) - len(shape))
        if own >= 0 and x[own] != 1:
            require(index < 0 or shape[index] == 1 or x[own] == shape[index], "a dimension may be repeated")
            return InputCuts(((own, span), None), (shape, index, 1))
        length = span.length(out[axis])
        require(length is not None and index >= 0, "how much is left is not known")
        return InputCuts((None, None), (shape, index, length))

    def rebuild(self, op: Op, plan: _Plan, inputs: Sequence[Val | None]) -> Any:
        shape = list(plan.extra[0][1][0])
        for _, (_, index, length) in plan.extra:
            if index >= 0:
                shape[index] = length
        return op.Expand(inputs[0], shape)


class PushSliceThroughMovement(_PushSliceThroughParts):
    """slice(concat(x, y)) -> concat(slice(x), slice(y)),  slice(gather(x, i)) -> gather(x, slice(i)).

    For a cut along dimensions that do not come from the indices, the data of a Gather are cut. An Expand creates fewer
    positions.
    """

    may_lose_errors = ("sizes", "indices")
    parts = (_ThroughConcat(), _IntoGather(), _ThroughExpand())
    examples = graphs(
        "(float[N,5,2] x, float[N,5,3] z) => (float[N,5] y) { a = Concat<axis=2>(x, z) y = Gather<axis=1>(a, 0) }",
        "(float[5,N] x, float[5,M] z) => (float[2,K] y) { a = Concat<axis=1>(x, z) y = Slice(a, [1], [3], [0]) }",
        "(float[7,3] e, int64[N,5] i) => (float[N,3] y) { a = Gather(e, i) y = Gather<axis=1>(a, 0) }",
        "(float[7,3] e, int64[N,5] i) => (float[N,5,2] y) { a = Gather(e, i) y = Slice(a, [0], [2], [2]) }",
        "(float[5,4,2] e, int64[3] i) => (float[2,3,2] y) { a = Gather<axis=1>(e, i) y = Slice(a, [1], [3], [0]) }",
        "(float[N,1,4] x) => (float[N,2,4] y) { a = Expand(x, [1, 5, 1]) y = Slice(a, [1], [3], [1]) }",
        "(float[5,1] x) => (float[2,2,4] y) { a = Expand(x, [2, 5, 4]) y = Slice(a, [1], [3], [1]) }",
    )


# Windows


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a convolution or pool along its spatial axes; `pads` are pairs (before, after)."""

    sizes: tuple[Dim, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @staticmethod
    def of(node: Node, shape: Sequence[Dim], kernel: Sequence[int]) -> _Windows:
        n = len(kernel)

        def numbers(name: str, default: int, count: int) -> tuple[int, ...]:
            value = node.attrs.get(name)
            return tuple(int(v) for v in value) if isinstance(value, tuple) else (default,) * count

        sizes, strides, dilations = tuple(shape[2:]), numbers("strides", 1, n), numbers("dilations", 1, n)
        flat = numbers("pads", 0, 2 * n)
        pads = list(zip(flat[:n], flat[n:]))
        auto = node.attrs.get("auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            for i, (size, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations)):
                require(isinstance(size, int), "the padding is not known")
                reach = (-(-int(size or 0) // s) - 1) * s + (k - 1) * d + 1
                total = max(0, reach - int(size or 0))
                less, more = total // 2, total - total // 2
                pads[i] = (less, more) if auto == "SAME_UPPER" else (more, less)
        return _Windows(sizes, tuple(kernel), strides, dilations, tuple(pads))

    def reads(self, i: int, span: Span) -> tuple[Span, tuple[int, int]]:
        """The positions of the input that given positions of the result read along spatial axis i, and the padding of
        these.
        """
        size = self.sizes[i]
        require(span.is_run and isinstance(size, int), "where the windows lie is not known")
        size = int(size or 0)
        before, after = self.pads[i]
        start = span.start * self.strides[i] - before
        stop = (span.stop - 1) * self.strides[i] - before + (self.kernel[i] - 1) * self.dilations[i] + 1
        require(stop <= size + after, "a window reaches beyond the padding")
        require(max(start, 0) < min(stop, size), "only padding is read")
        return Span(max(start, 0), min(stop, size)), (max(0, -start), max(0, stop - size))


class _PushCrop(_PushSlice):
    """The common part of the rules for convolutions and pools."""

    def crop(self, windows: _Windows, axis: int, span: Span) -> InputCuts:
        """How a cut along a spatial axis passes the operator."""
        needed, pads = windows.reads(axis - 2, span)
        axis_span = None if needed.is_all(windows.sizes[axis - 2]) else (axis, needed)
        return InputCuts((axis_span,), (windows.pads, pads))

    @staticmethod
    def pads(plan: _Plan) -> list[int] | None:
        """All pads of the operator, with new ones for axes that were cut; None if no spatial axis was cut."""
        spatial = [(at - 2, extra) for at, extra in plan.extra if at >= 2]
        if not spatial:
            return None
        pads = list(spatial[0][1][0])
        for i, (_, own) in spatial:
            pads[i] = own
        return [p for p, _ in pads] + [p for _, p in pads]


class _ThroughConv(_PushCrop):
    """slice(conv(x, w, b)) -> conv(slice(x), w, b)  with the margin that its windows read, and less padding.

    For a cut along the result's channels, the weights are cut, and for a grouped convolution also the groups of x.
    """

    operators, reads_from = _above("Conv")

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        if axis == 0:
            return _same(span, 0)
        weights = node.inputs[1:]
        x, w = reader.val(node.inputs[0]), reader.val(node.inputs[1])
        if axis == 1:
            groups = int_attr(node, "group", 1)
            profitable(groups > 0, "there are no groups")
            profitable(all(reader.type(v).rank == 1 for v in weights[1:]), "the bias is no vector")
            if groups == 1:
                return _same(span, None, *(0 for _ in weights))
            each, channels = w.size(0) // groups, w.size(1)
            require(span.is_run, "the channels are not neighbours")
            require(span.start % each == 0 and span.stop % each == 0, "it cuts inside a group")
            first, last = span.start // each, span.stop // each
            part = Span(first * channels, last * channels)
            return InputCuts(((1, part), *((0, span) for _ in weights)), last - first)
        kernel = tuple(w.size(i) for i in range(2, w.rank))
        return self.crop(_Windows.of(node, x.shape, kernel), axis, span)

    def rebuild(self, op: Op, plan: _Plan, inputs: Sequence[Val | None]) -> Any:
        named: dict[str, Any] = {}
        pads = self.pads(plan)
        if pads is not None:
            named |= {"pads": pads, "auto_pad": None}
        for at, extra in plan.extra:
            if at == 1 and extra is not None:
                named["group"] = extra
        return op.Conv(*inputs, attrs=plan.attrs, **named)


class _ThroughPool(_PushCrop):
    """slice(pool(x)) -> pool(slice(x))  with the margin that its windows read, and less padding."""

    operators, reads_from = _above(
        *("MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
    )
    needs_some = operators

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        if axis < 2:
            return _same(span, axis)
        require(not node.op.startswith("Global"), "it is reduced along this axis")
        shape, kernel = reader.val(node.inputs[0]).shape, node.attrs["kernel_shape"]
        assert isinstance(kernel, tuple)
        return self.crop(_Windows.of(node, shape, [int(k) for k in kernel]), axis, span)

    def rebuild(self, op: Op, plan: _Plan, inputs: Sequence[Val | None]) -> Any:
        pads = self.pads(plan)
        if pads is None:
            return op[plan.op](*inputs, attrs=plan.attrs)
        return op[plan.op](*inputs, attrs=plan.attrs, pads=pads, auto_pad=None, ceil_mode=None)


class _ThroughPad(_PushSlice):
    """slice(pad(x)) -> pad(slice(x))  with less padding;  in any mode along a dimension that is not padded."""

    operators, reads_from = _above("Pad")

    def input_cuts(self, reader: Reader, node: Node, axis: int, span: Span) -> InputCuts:
        x = reader.val(node.inputs[0])
        widths = ints_input(reader, node, 1) or ()
        axes_input = ints_input(reader, node, 3)
        axes = fronts(tuple(range(x.rank)) if axes_input is None else axes_input, x.rank)
        profitable(len(widths) == 2 * len(axes), "the pads are of other axes")
        n, index = len(axes), axes.index(axis) if axis in axes else None
        if index is None or (widths[index], widths[index + n]) == (0, 0):
            return InputCuts(((axis, span),), (widths, n, None, 0, 0))
        require(node.attrs.get("mode", "constant") == "constant", "the padding is taken from the data")
        window = _Windows((x.size(axis),), (1,), (1,), (1,), ((widths[index], widths[index + n]),))
        needed, pads = window.reads(0, span)
        axis_span = None if needed.is_all(x.size(axis)) else (axis, needed)
        return InputCuts((axis_span,), (widths, n, index, *pads))

    def rebuild(self, op: Op, plan: _Plan, inputs: Sequence[Val | None]) -> Any:
        widths = list(plan.extra[0][1][0])
        for _, (_, n, index, before, after) in plan.extra:
            if index is not None:
                widths[index], widths[index + n] = before, after
        x, _, *more = inputs
        return op.Pad(x, widths, *more, attrs=plan.attrs)


class PushSliceThroughWindows(_PushSliceThroughParts):
    """slice(conv(x, w, b)) -> conv(slice(x), w, b)  with the margin that the windows read, and less padding.

    Pools and Pad are handled in the same way. For a cut along the channels of a convolution's result, its weights are
    cut, and for a grouped convolution also the groups of x.
    """

    may_lose_errors = ("sizes",)
    parts = (_ThroughConv(), _ThroughPool(), _ThroughPad())
    survivors: ClassVar[Mapping[str, str]] = {"drop: there may be nothing left": _NOTHING}
    near_misses = graphs(
        "(float[N,2,6] x) => (float[N,2,2] y) { a = AveragePool<kernel_shape=[3], "
        "strides=[2], ceil_mode=1, pads=[2,0], count_include_pad=1>(x) y = Slice(a, [2], [4], [2]) }",
    )
    examples = graphs(
        "(float[N,2,8,8] x, float[3,2,3,3] w, float[3] b) => (float[N,3,2,2] y) "
        "{ a = Conv<pads=[1,1,1,1]>(x, w, b) y = Slice(a, [0, 3], [2, 5], [2, 3]) }",
        "(float[1,2,9] x, float[4,2,3] w) => (float[1,4] y) "
        "{ a = Conv<dilations=[2], strides=[2], pads=[4,0]>(x, w) y = Gather<axis=2>(a, -1) }",
        "(float[1,4,7] x, float[6,2,2] w, float[6] b) => (float[1,3,2] y) "
        '{ a = Conv<group=2, auto_pad="SAME_UPPER">(x, w, b) y = Slice(a, [3, 4], [6, 6], [1, 2]) }',
        "(float[2,2,5] x, float[4,2,1] w, float[4] b) => (float[2,2,5] y) "
        "{ a = Conv(x, w, b) y = Slice(a, [1], [3], [1]) }",
        "(float[N,2,8,8] x) => (float[N,2,2,1] y) "
        "{ a = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x) y = Slice(a, [0, 3], [2, 4], [2, 3]) }",
        "(float[N,2,9] x) => (float[N,2] y) "
        "{ a = AveragePool<kernel_shape=[3], pads=[1,1], count_include_pad=1>(x) y = Gather<axis=2>(a, -1) }",
        "(float[N,2,6] x) => (float[N,2,1] y) "
        "{ a = MaxPool<kernel_shape=[3], strides=[2], ceil_mode=1>(x) y = Slice(a, [1], [2], [2]) }",
        "(float[N,2,6] x) => (float[N,2,2] y) { a = AveragePool<kernel_shape=[3], "
        "strides=[2], ceil_mode=1, pads=[2,0], count_include_pad=1>(x) y = Slice(a, [1], [3], [2]) }",
        "(float[N,5,6] x) => (float[N,2,1] y) { a = GlobalAveragePool(x) y = Slice(a, [1], [3], [1]) }",
        "(float[N,5,6] x) => (float[N,5,3] y) { a = Pad(x, [0, 0, 1, 0, 0, 2]) y = Slice(a, [0], [3], [2]) }",
        "(float[N,5,6] x, float c) => (float[N,9] y) { a = Pad(x, [2, 1], c, [2]) y = Gather<axis=1>(a, 3) }",
        '(float[5,6] x) => (float[2,9] y) { a = Pad<mode="reflect">(x, [0, 1, 0, 2]) y = Slice(a, [1], [3], [0]) }',
    )


# Several outputs


class PushSlicesThroughSplit(RegionRule, family="demand"):
    """slice(split(x)), each part alike -> split(slice(x))  along another axis than the split's."""

    anchors = ("Slice", "Gather")
    reads_from = ("Split",)
    examples = graphs(
        "(float[N,5,6] x) => (float[N,2] y, float[N,4] z) "
        "{ a, b = Split<axis=2>(x, [2, 4]) y = Gather<axis=1>(a, 0) z = Gather<axis=1>(b, 0) }",
        "(float[5,6] x) => (float[2,3] y, float[2,3] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Slice(a, [1], [3], [0]) z = Slice(b, [1], [3], [0]) }",
        "(float[5,4] x) => (float[2,4] y) { a = Split<axis=1, num_outputs=1>(x) y = Slice(a, [1], [3], [0]) }",
    )
    near_misses = graphs(
        "(float[5,8] x) => (float[2,2] y, float[2,2] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Slice(a, [1, 1], [3, 3]) z = Slice(b, [1, 1], [3, 3]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        split = made_by(reader, node.inputs[0], "Split")
        if split is None:
            return None
        own = find_cut(reader, node)
        if own is None:
            return None
        cuts: list[Cut] = []
        parts: list[int] = []
        for index, value in enumerate(split.outputs):
            users = reader.users(value)
            if not users and not reader.is_output(value):
                continue
            profitable(len(users) == 1 and not reader.is_output(value), "all of a part is read")
            cut = find_cut(reader, users[0]) if users[0].op in self.anchors else None
            require(cut is not None and cut.spans == own.spans, "the parts are not cut alike")
            assert cut is not None
            profitable(users[0].inputs[0] == value, "a part is an index")
            cuts.append(cut)
            parts.append(index)
        if min(c.node.id for c in cuts) != node.id:
            return None
        axis = axis_of(split, rank_of(reader, split.inputs[0]))
        require(all(a != axis for a, _ in own.spans), "it is split along this axis")
        sizes = required(sizes_along(reader, split.outputs, axis), "a part's size is not known")
        dropped = tuple(c.dropped for c in cuts)
        data = (own.spans, axis, tuple(sizes), tuple(parts), dropped)
        outputs = tuple(c.node.outputs[0] for c in cuts)
        return Region(outputs, split.inputs[:1], (*(c.node for c in cuts), split), data)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        spans, axis, sizes, indices, dropped = region.data
        parts = op.Split(take(op, x, spans), axis=axis, sizes=list(sizes))
        parts = parts if len(sizes) > 1 else (parts,)
        return [
            parts[k] if drop is None else op.Squeeze(parts[k], [drop]) for k, drop in zip(indices, dropped)
        ]


_CELLS = ("LSTM", "GRU", "RNN")


class ReplaceLastStepByFinalState(RegionRule, family="demand"):
    """lstm(x).y[-1] -> lstm(x).y_h  forwards, y[0] backwards;  GRU and RNN alike."""

    may_lose_errors = ("sizes",)
    proof = "numeric"
    relies_on = "no property: but numbers pass so many gates that the bound of a proof would mean nothing"
    anchors = ("Slice", "Gather")
    reads_from = _CELLS
    dtypes = FLOATS
    examples = graphs(
        "(float[5,N,3] x, float[1,8,3] w, float[1,8,2] r) => (float[1,N,2] y) "
        "{ a = LSTM<hidden_size=2>(x, w, r) y = Gather(a, -1) }",
        "(float[5,N,3] x, float[1,6,3] w, float[1,6,2] r) => (float[1,1,N,2] y) "
        '{ a, b = GRU<hidden_size=2, direction="reverse">(x, w, r) y = Slice(a, [0], [1], [0]) }',
        "(float[5,N,3] x, float[1,2,3] w, float[1,2,2] r, float[1,4] b) => (float[1,N,2] y) "
        "{ a = RNN<hidden_size=2>(x, w, r, b) y = Gather(a, 4) }",
        "(float[S,N,3] x, float[1,8,3] w, float[1,8,2] r) => (float[1,N,2] y) "
        "{ a = LSTM<hidden_size=2>(x, w, r) y = Gather(a, -1) }",
        "(float[S,N,3] x, float[1,6,3] w, float[1,6,2] r) => (float[1,1,N,2] y) "
        '{ a = GRU<hidden_size=2, direction="reverse">(x, w, r) y = Gather(a, [0]) }',
    )
    near_misses = graphs(
        "(float[5,N,3] x, float[1,2,3] w, float[1,2,2] r, int32[N] l) => (float[1,N,2] y) "
        "{ a = RNN<hidden_size=2>(x, w, r, , l) y = Gather(a, 4) }",
        "(float[5,N,3] x, float[2,2,3] w, float[2,2,2] r) => (float[2,N,2] y) "
        '{ a = RNN<hidden_size=2, direction="bidirectional">(x, w, r) y = Gather(a, 4) }',
        "(float[S,N,3] x, float[1,2,3] w, float[1,2,2] r) => (float[T,1,N,2] y) "
        "{ a = RNN<hidden_size=2>(x, w, r) y = Slice(a, [-1], [9223372036854775807], [0]) }",
        "(float[S,N,3] x, float[1,2,3] w, float[1,2,2] r) => (float[T,1,N,2] y) "
        '{ a = RNN<hidden_size=2, direction="reverse">(x, w, r) y = Slice(a, [0], [1], [0]) }',
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = made_by(reader, node.inputs[0], *_CELLS)
        if inner is None:
            return None
        if node.inputs[0] != inner.outputs[0]:
            return None
        cut = find_cut(reader, node)
        if cut is None:
            return None
        require(not inner.attrs.get("layout"), "the steps are in another place")
        require(reader.val(inner.inputs[1]).shape[0] == 1, "the directions end at different steps")
        require(len(inner.inputs) < 5 or inner.inputs[4] == ABSENT, "a sequence may end earlier")
        (axis, span), *more = cut.spans
        require(axis == 0 and not more, "it is not a step")
        steps = reader.val(node.inputs[0]).shape[0]
        backwards = inner.attrs.get("direction") == "reverse"
        if isinstance(steps, int):
            expected = Span(0, 1) if backwards else Span(steps - 1, steps)
        else:  # for a sequence without steps, a Slice gives an empty result and a Gather fails
            expected = Span(listed=(0 if backwards else -1,))
        require(span == expected, "it is not the step that the final state is of")
        profitable(read_once(reader, node.inputs[0]), "other steps are read")
        data = (inner.op, inner.attrs, cut.dropped)
        return Region(node.outputs, inner.inputs, (node, inner), data)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, dropped = region.data
        _, state = op[name](*inputs, attrs=attrs, outputs=2)
        return state if dropped is not None else op.Unsqueeze(state, [0])


# Keys and values if there are few queries


@dataclass(frozen=True, slots=True)
class _Projection:
    """The value heads(x @ w + b): x[n,s,c], w[c,h*d] and b[h*d] constant, cut into h heads of d features and
    transposed.
    """

    x: Value
    weight: Value
    bias: Value  # ABSENT: no bias
    heads: int
    depth: int
    channels: int
    nodes: tuple[Node, ...]


def _find_projection(reader: Reader, value: Value, perm: tuple[int, ...]) -> _Projection | None:
    """A value as a linear layer that is cut into heads and transposed by `perm`, and whose inner values have no other
    readers; None if it is something else.
    """
    nodes: list[Node] = []

    def producer(v: Value, *operators: str) -> Node | None:
        node = reader.producer(v)
        if node is None or node.op not in operators or node.const or not read_once(reader, v):
            return None
        nodes.append(node)
        return node

    transpose = producer(value, "Transpose")
    if transpose is None or perm_of(transpose, rank_of(reader, value)) != perm:
        return None
    view = producer(transpose.inputs[0], *VIEWS)
    if view is None:
        return None
    flat, cut = reader.type(view.inputs[0]).shape, reader.type(view.outputs[0]).shape
    if flat is None or cut is None or len(flat) != 3 or len(cut) != 4:
        return None
    if not same_dims(flat[:2], cut[:2]):
        return None
    at, bias = view.inputs[0], ABSENT
    add = reader.producer(at)
    if add is not None and add.op == "Add":
        constant = [v for v in add.inputs if reader.is_const(v)]
        if len(constant) != 1 or producer(at, "Add") is None:
            return None
        bias = constant[0]
        require(reader.val(bias).shape == (flat[2],), "the bias is not one number per feature")
        at = next(v for v in add.inputs if v != bias)
    product = producer(at, "MatMul")
    if product is None or not reader.is_const(product.inputs[1]) or reader.is_const(product.inputs[0]):
        return None
    x, weight = (reader.val(v) for v in product.inputs)
    require((x.rank, weight.rank) == (3, 2), "the layer is not a matrix for all")
    profitable(weight.size(0) > 0, "the layer is a sum of nothing")
    heads, depth = reader.val(view.outputs[0]).size(2), reader.val(view.outputs[0]).size(3)
    profitable(heads * depth == weight.size(1), "the heads are not of the layer's features")
    return _Projection(x.value, weight.value, bias, heads, depth, weight.size(0), tuple(nodes))


def _query_count(reader: Reader, queries: Value, projection: _Projection) -> int:
    """The number of queries. Refuses if there are so many that multiplying them by x costs more."""
    dims = reader.val(queries)
    require(dims.rank == 4, "there are no heads")
    rows = dims.size(2)
    if rows != 1:  # all queries become one matrix, which cannot broadcast
        require(dims.shape[1] == projection.heads, "the heads are other ones")
        require(same_dims(dims.shape[:1], reader.val(projection.x).shape[:1]), "the batches differ")
    depth, channels = projection.depth, projection.channels
    profitable(2 * rows * channels <= depth * (channels + rows), "there are many queries")
    return rows


@dataclass(frozen=True, slots=True)
class _Detour:
    """The sizes of a product with x, and its reshapes: `flat` puts all queries in one matrix, `apart` undoes this.

    A single query needs no reshapes (None), so batch and length may then be unknown.
    """

    heads: int
    depth: int
    channels: int
    flat: tuple[int, ...] | None
    apart: tuple[int, ...] | None

    @staticmethod
    def of(projection: _Projection, rows: int, before: Sequence[Dim], after: Sequence[Dim]) -> _Detour:
        """`before` and `after` are the dimensions [n,h,r,...] of the operand that becomes a matrix, and of the
        result.
        """
        flat = apart = None
        if rows != 1:
            wide = projection.heads * rows
            flat = tuple(reshape_numbers(before, (before[0], wide, before[3])))
            apart = tuple(reshape_numbers((after[0], wide, after[3]), after))
        return _Detour(projection.heads, projection.depth, projection.channels, flat, apart)

    def flatten(self, op: Op, x: Val) -> Any:
        return op.Squeeze(x, [2]) if self.flat is None else op.Reshape(x, list(self.flat))

    def part(self, op: Op, x: Val) -> Any:
        return op.Unsqueeze(x, [2]) if self.apart is None else op.Reshape(x, list(self.apart))


def _key_detour(reader: Reader, q: Value, projection: _Projection) -> _Detour:
    """The sizes and reshapes for the scores of queries q[n,h,r,d]. Refuses if the left side is not more expensive."""
    rows = _query_count(reader, q, projection)
    batch, length = reader.val(projection.x).shape[:2]
    lead = (batch, projection.heads, rows)
    return _Detour.of(projection, rows, (*lead, projection.channels), (*lead, length))


def _scores(op: Op, detour: _Detour, q: Val, x: Val, w: Val, b: Val | None) -> Any:
    """The scores (q @ w_h^T) @ x^T + q @ b_h^T."""
    weights = op.Transpose(op.Reshape(w, [detour.channels, detour.heads, detour.depth]), perm=[1, 2, 0])
    rows = detour.flatten(op, op.MatMul(q, weights))
    # The product is computed transposed, and transposed back, since the rows are few and x is large.
    scores = op.Transpose(op.MatMul(x, op.Transpose(rows, perm=[0, 2, 1])), perm=[0, 2, 1])
    scores = detour.part(op, scores)
    return (
        scores if b is None else op.Add(scores, op.MatMul(q, op.Reshape(b, [detour.heads, detour.depth, 1])))
    )


def _value_detour(batch: Dim, rows: int, length: Dim, projection: _Projection) -> _Detour:
    """The sizes and reshapes for the products of the weights p[n,h,r,s] with the values."""
    lead = (batch, projection.heads, rows)
    return _Detour.of(projection, rows, (*lead, length), (*lead, projection.channels))


def _weighted(op: Op, detour: _Detour, p: Val, x: Val, w: Val, b: Val | None) -> Any:
    """The result (p @ x) @ w_h + sum(p) * b_h."""
    weights = op.Transpose(op.Reshape(w, [detour.channels, detour.heads, detour.depth]), perm=[1, 0, 2])
    y = op.MatMul(detour.part(op, op.MatMul(detour.flatten(op, p), x)), weights)
    if b is None:
        return y
    total = op.ReduceSum(p, [p.rank - 1], keepdims=1)
    return op.Add(y, op.Mul(total, op.Reshape(b, [detour.heads, 1, detour.depth])))


class PushKeyWeightsIntoQueries(RegionRule, family="demand"):
    """q @ heads(x @ w + b)^T -> (q @ w_h^T) @ x^T + q @ b_h^T  for each head h, so that few queries need no keys."""

    anchors = ("MatMul",)
    reads_from = ("Transpose",)
    may_add_nonfinite = True
    dtypes = FLOATS
    examples = graphs(
        "(float[N,2,1,6] q, float[N,5,4] x) => (float[N,2,1,5] y) <float[4,12] "
        "w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, "
        "float[12] b = {1,2,3,4,5,6,7,8,9,8,7,6}> { k = MatMul(x, w) "
        "l = Add(k, b) r = Reshape(l, [0, 0, 2, 6]) t = Transpose<perm=[0,2,3,1]>(r) y = MatMul(q, t) }",
        "(float[1,2,2,9] q, float[1,3,2] x) => (float[1,2,2,3] y) "
        "<float[2,18] w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4}> "
        "{ k = MatMul(x, w) r = Reshape(k, [1, -1, 2, 9]) t = Transpose<perm=[0,2,3,1]>(r) y = MatMul(q, t) }",
        "(float[1,2,1,3] q, float[1,S,2] x) => (float[1,2,1,S] y) <float[2,6] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ k = MatMul(x, w) r = Reshape(k, [1, -1, 2, 3]) t = Transpose<perm=[0,2,3,1]>(r) y = MatMul(q, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        projection = _find_projection(reader, node.inputs[1], (0, 2, 3, 1))
        if projection is None:
            return None
        q = node.inputs[0]
        detour = _key_detour(reader, q, projection)
        inputs = (q, projection.x, projection.weight, projection.bias)
        return Region(node.outputs, inputs, (node, *projection.nodes), detour)

    def target(self, op: Op, region: Region, q: Val, x: Val, w: Val, b: Val | None) -> Any:
        return _scores(op, region.data, q, x, w, b)


class PushValueWeightsBehindScores(RegionRule, family="demand"):
    """p @ heads(x @ w + b) -> (p @ x) @ w_h + sum(p) * b_h  for each head h, so that few queries need no values."""

    nonempty = True
    anchors = ("MatMul",)
    reads_from = ("Transpose",)
    may_add_nonfinite = True
    dtypes = FLOATS
    survivors: ClassVar[Mapping[str, str]] = {
        "omit Reshape (call 2)": "scores of one sequence times its rows broadcast: a product for each head"
    }
    near_misses = graphs(
        "(float[1,2,2,3] p, float[2,3,2] x) => (float[2,2,2,9] y) "
        "<float[2,18] w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4}> "
        "{ k = MatMul(x, w) r = Reshape(k, [2, -1, 2, 9]) t = Transpose<perm=[0,2,1,3]>(r) y = MatMul(p, t) }",
    )
    examples = graphs(
        "(float[N,2,1,5] p, float[N,5,4] x) => (float[N,2,1,6] y) <float[4,12] "
        "w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, "
        "float[12] b = {1,2,3,4,5,6,7,8,9,8,7,6}> { k = MatMul(x, w) "
        "l = Add(k, b) r = Reshape(l, [0, 0, 2, 6]) t = Transpose<perm=[0,2,1,3]>(r) y = MatMul(p, t) }",
        "(float[1,2,2,3] p, float[1,3,2] x) => (float[1,2,2,9] y) "
        "<float[2,18] w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4}> "
        "{ k = MatMul(x, w) r = Reshape(k, [1, -1, 2, 9]) t = Transpose<perm=[0,2,1,3]>(r) y = MatMul(p, t) }",
        "(float[1,2,1,S] p, float[1,S,2] x) => (float[1,2,1,3] y) <float[2,6] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ k = MatMul(x, w) r = Reshape(k, [1, -1, 2, 3]) t = Transpose<perm=[0,2,1,3]>(r) y = MatMul(p, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        projection = _find_projection(reader, node.inputs[1], (0, 2, 1, 3))
        if projection is None:
            return None
        p = node.inputs[0]
        rows = _query_count(reader, p, projection)
        detour = _value_detour(reader.val(p).shape[0], rows, reader.val(p).shape[3], projection)
        inputs = (p, projection.x, projection.weight, projection.bias)
        return Region(node.outputs, inputs, (node, *projection.nodes), detour)

    def target(self, op: Op, region: Region, p: Val, x: Val, w: Val, b: Val | None) -> Any:
        return _weighted(op, region.data, p, x, w, b)


class PushWeightsOutOfAttention(RegionRule, family="demand"):
    """attention(q, heads(x @ v + a), heads(z @ w + b), m) -> (softmax(s + m) @ z) @ w_h + b_h  for few queries.

    Here s = scale * (q @ v_h^T) @ x^T. The term q @ a_h^T is left out, because it is the same for all keys. Neither
    keys nor values are computed.
    """

    may_lose_errors = ("sizes",)
    proof = "numeric"
    relies_on = "a softmax is that of its input and any number; the scale of Attention, rounded to float32"
    # Attention gives zeros for a row that -inf masks completely. If a number of x is infinite, it depends on the order
    # of the sums whether a score is NaN, or -inf, which the softmax masks.
    may_add_nonfinite = True
    may_remove_nonfinite = True
    dtypes = FLOATS
    anchors = ("Attention",)
    reads_from = ("Transpose",)
    examples = graphs(
        "(float[1,2,1,6] q, float[1,5,4] x, float[1,1,1,5] m) => (float[1,2,1,6] y) <float[4,12] "
        "w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, "
        "float[4,12] "
        "v = {7,6,5,4,3,2,1,1,2,3,4,5,4,3,2,1,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,6,5,4,3,2,1,2,3,4,5,6,7,8,9,8,7}, "
        "float[12] b = {1,2,3,4,5,6,7,8,9,8,7,6}> { k = MatMul(x, w) "
        "l = Add(k, b) r = Reshape(l, [0, 0, 2, 6]) t = Transpose<perm=[0,2,1,3]>(r) e = MatMul(x, v) "
        "f = Reshape(e, [0, 0, 2, 6]) g = Transpose<perm=[0,2,1,3]>(f) y = Attention<scale=0.5>(q, t, g, m) }",
        "(float[1,2,1,3] q, float[1,S,2] x, float[1,S,2] z) => (float[1,2,1,3] y) "
        "<float[2,6] w = {1,2,3,4,5,6,7,8,9,8,7,6}, float[2,6] v = {3,2,1,4,5,6,7,8,2,1,2,3}> { k = MatMul(x, w) "
        "r = Reshape(k, [1, -1, 2, 3]) t = Transpose<perm=[0,2,1,3]>(r) e = MatMul(z, v) l = Add([1.0, "
        "2, 3, 4, 5, 6], e) f = Reshape(l, [1, -1, 2, 3]) g = Transpose<perm=[0,2,1,3]>(f) y = Attention(q, t, g) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: the batches differ": "Attention takes what is of one batch, whatever its dimension is called"
    }
    near_misses = (
        examples[0].replace("float[1,1,1,5] m", "bool[1,1,1,5] m"),
        examples[0].replace("scale=0.5", "scale=0.5, is_causal=1"),
        examples[0]
        .replace("float[1,1,1,5] m", "float[1,2,3,6] m, float[1,2,3,6] n")
        .replace("(q, t, g, m)", "(q, t, g, , m, n)"),
        # With two sequences, the rows of the heads do not broadcast.
        examples[0].replace("float[1,2,1,6]", "float[2,2,1,6]").replace("float[1,5,4] x", "float[2,5,4] x"),
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        q, k, v, *more = node.inputs
        if len(node.outputs) > 1:
            return None
        keys = _find_projection(reader, k, (0, 2, 1, 3))
        values = None if keys is None else _find_projection(reader, v, (0, 2, 1, 3))
        if keys is None or values is None:
            return None
        mask = more[0] if more else ABSENT
        require(all(r == ABSENT for r in more[1:]), "there are past keys")
        require(not node.attrs.get("is_causal"), "it is causal")
        require(not node.attrs.get("softcap"), "the scores are capped")
        heads = reader.val(q).shape[1]
        require(heads == keys.heads == values.heads, "heads share keys")
        first = _key_detour(reader, q, keys)
        rows = _query_count(reader, q, values)
        batch, length = reader.val(keys.x).shape[:2]
        if mask != ABSENT:
            require(reader.type(mask).dtype == reader.type(q).dtype, "the mask is not added")
            profitable(reader.val(mask).rank <= 4, "the mask has more dimensions than the scores")
        second = _value_detour(batch, rows, length, values)
        scale = node.attrs.get("scale", first.depth**-0.5)
        inputs = (q, keys.x, keys.weight, keys.bias, values.x, values.weight, values.bias, mask)
        nodes = (node, *keys.nodes, *values.nodes)
        return Region(node.outputs, inputs, nodes, (scale, first, second))

    def target(self, op: Op, region: Region, *inputs: Any) -> Any:
        scale, first, second = region.data
        q, x, v, _, z, w, b, mask = inputs
        # A term that is the same for all keys does not change a softmax.
        scores = _scores(op, first, op.Mul(q, scale), x, v, None)
        if mask is not None:
            scores = op.Add(scores, mask)
        return _weighted(op, second, op.Softmax(scores, axis=-1), z, w, b)
