"""Coverage: which kinds of values a proof must try, and what it has found for each so far.

The *demands* of a rule are the kinds of everything that its declaration or its examples leave open: attributes that it
captures, index inputs, dimensions, ranks, element types. Sketches (small graphs) are drawn for each kind until it is
settled: a case of the kind was admitted and tested, or enough graphs of the kind were refused or did not match, or no
graph of the kind could be built. A proof fails if no test could evaluate an admitted kind. The proof of a pattern rule
also fails if no graph of a kind (other than a rank or type) could be built.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from xrlflow.ir import ABSENT, FLOATS, DType, TensorType
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.cases import Case
from xrlflow.prover.draw import Draw
from xrlflow.prover.equivalence_classes import (
    DegenerateSample,
    Kind,
    Sort,
    UndefinedExpression,
    attribute_names,
    attribute_subject,
    family,
    index_family,
    index_subject,
    shown,
)
from xrlflow.prover.patterns import TYPES, dimension_of, dimension_subject, give, operator_subject
from xrlflow.prover.sketch import Problem, Sketch, SketchConst, with_const, with_node
from xrlflow.prover.variations import forget, replace_dims, resize_to
from xrlflow.rewrite import AnyRule
from xrlflow.rewrite.rule import Site, VarSpec

# A kind is settled after so many graphs that were not admitted, or after so many failed attempts to build a graph of
# it.
ENOUGH, MOST_ATTEMPTS = 16, 120
# The same limit for an element type, and the number of cases that each type needs. They are lower because there are
# many types, and most operators take few of them.
_MOST_OUTCOMES, _MOST_TYPES, _CASES_OF_TYPE = 14, 20, 3

# The outcomes for a graph: a tested case, a refused match, no match, a case that no test could evaluate.
Outcome = Literal["admitted", "refused", "beside", "untested"]


@dataclass(slots=True)
class Tally:
    """The outcomes for the graphs of one kind.

    `attempts` counts the attempts to build a graph of the kind; in `meaningless` of them the subject has no value of
    the kind, for example because the rank is too low.
    """

    admitted: int = 0
    refused: int = 0
    beside: int = 0
    untested: int = 0
    attempts: int = 0
    meaningless: int = 0

    @property
    def outcomes(self) -> int:
        return self.admitted + self.refused + self.beside + self.untested

    required: int = 1
    most_outcomes: int = ENOUGH
    most_attempts: int = MOST_ATTEMPTS

    @property
    def settled(self) -> bool:
        return (
            self.admitted >= self.required
            or self.outcomes >= self.most_outcomes
            or self.attempts >= self.most_attempts
        )

    @property
    def verdict(self) -> str:
        if self.admitted:
            return "admitted"
        if self.untested:
            return "untested"
        if self.refused:
            return "refused"
        if self.beside:
            return "beside"
        return "meaningless" if 0 < self.meaningless == self.attempts else "unbuilt"


@dataclass(slots=True)
class Coverage:
    """The kinds that a proof demands, with the tally of each."""

    tallies: dict[Kind, Tally]
    subjects: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.subjects = frozenset(k.subject for k in self.tallies)

    @classmethod
    def of(cls, kinds: Iterable[Kind]) -> Coverage:
        of_type = Tally(required=_CASES_OF_TYPE, most_outcomes=_MOST_OUTCOMES, most_attempts=_MOST_TYPES)
        return cls({k: replace(of_type) if k.subject == "type" else Tally() for k in kinds})

    def shown_by(self, problem: Problem) -> set[Kind]:
        """The demanded kinds that a problem (a built sketch) shows."""
        kinds = {*shown(problem.graph, self.subjects), *problem.sketch.shown_kinds}
        return kinds & self.tallies.keys()

    def count(self, kinds: Iterable[Kind], outcome: Outcome) -> None:
        for kind in kinds:
            tally = self.tallies[kind]
            setattr(tally, outcome, getattr(tally, outcome) + 1)

    def new(self, kinds: Iterable[Kind]) -> bool:
        """Whether one of these kinds has too few admitted cases so far."""
        return any(t.admitted < t.required for t in map(self.tallies.__getitem__, kinds))

    @property
    def open(self) -> list[Kind]:
        return [k for k, t in self.tallies.items() if not t.settled]

    def with_verdict(self, verdict: str) -> list[Kind]:
        """The kinds that have this verdict."""
        return [k for k, t in self.tallies.items() if t.verdict == verdict]

    def summary(self) -> dict[str, dict[str, str]]:
        """The verdict for each subject (a rule, for example) and the name of each kind of mutant."""
        out: dict[str, dict[str, str]] = {}
        for kind, tally in self.tallies.items():
            out.setdefault(kind.subject, {})[kind.name] = tally.verdict
        return out


# Demands of examples

_SIZES = ("0", "1", "a name", "not known")


def example_kinds(examples: Sequence[Sketch]) -> list[Kind]:
    """The kinds that variations of examples must show: of all their attributes and index inputs, sizes, ranks and
    types.
    """
    kinds: dict[Kind, None] = {}
    for sketch in examples:
        for node in sketch.nodes:
            for name in attribute_names(node.op):
                subject = attribute_subject(node.op, name)
                kinds.update(dict.fromkeys(Kind(subject, s.name) for s in family(node.op, name)))
            for index, ref in enumerate(node.inputs):
                if ref is not None and ref.kind == "const":
                    subject = index_subject(node.op, index)
                    kinds.update(dict.fromkeys(Kind(subject, s.name) for s in index_family(node.op, index)))
    if examples:
        kinds.update(dict.fromkeys(Kind("size", n) for n in _SIZES))
        kinds.update(dict.fromkeys(Kind("rank", n) for n in ("lower", "higher")))
        kinds.update(dict.fromkeys(Kind("type", t.name.lower()) for t in TYPES))
    return list(kinds)


def grant(sketch: Sketch, problem: Problem, wish: Kind, draw: Draw) -> Sketch:
    """Change a sketch, which builds `problem`, so that it shows the kind `wish`. Raises DegenerateSample."""
    sketch = replace(sketch, shown_kinds=frozenset())  # the change may make these kinds untrue
    if wish.subject == "size":
        return _with_size(sketch, wish, draw)
    if (dim := dimension_of(wish)) is not None:
        if dim not in sketch.dims:
            raise DegenerateSample("the sketch has no such dimension")
        resized = resize_to(sketch, sketch.dims[dim], int(wish.name), draw)
        return replace(resized, shown_kinds=frozenset({wish}), dims={})
    if wish.subject == "rank" and wish.name in ("lower", "higher"):
        return _with_rank(sketch, wish, draw)
    if wish.subject == "type":
        return _with_type(sketch, DType[wish.name.upper()])
    targets = _targets(sketch, wish)
    selected = targets if draw.chance(0.5) else [draw.choice(targets)]
    for at, name, index, sort in selected:
        node = sketch.nodes[at]
        shapes = [None if t is None else _sizes_of(t) for t in problem.arguments[at]]
        if not name:
            ref = node.inputs[index]
            assert ref is not None
            old = sketch.consts[ref.index].array
            array = np.asarray(sort.make(draw, shapes))
            if node.op != "Gather" and draw.chance(0.7):
                array = np.resize(array, old.shape) if array.size else array
            sketch = with_const(sketch, ref.index, array=array.astype(old.dtype))
        elif name == "group":
            sketch = _grouped(sketch, at, shapes, wish, draw)
        else:
            attrs = dict(node.attrs)
            give(attrs, name, sort.make(draw, shapes))
            sketch = with_node(sketch, at, attrs=attrs)
    return sketch


def _targets(sketch: Sketch, wish: Kind) -> list[tuple[int, str, int, Sort]]:
    """The places where a sketch can show a kind of an attribute or index input: index of the node, attribute (or ""),
    index of the input, and how to draw a value.
    """
    targets = []
    for at, node in enumerate(sketch.nodes):
        for name in attribute_names(node.op):
            if attribute_subject(node.op, name) == wish.subject:
                targets += [(at, name, 0, s) for s in family(node.op, name) if s.name == wish.name]
        for index, ref in enumerate(node.inputs):
            const = ref is not None and ref.kind == "const"
            if const and index_subject(node.op, index) == wish.subject:
                targets += [(at, "", index, s) for s in index_family(node.op, index) if s.name == wish.name]
    if not targets:
        raise DegenerateSample("the example has no such operator")
    return targets


def _sizes_of(type: TensorType) -> tuple[int, ...] | None:
    return None if type.shape is None else tuple(d if isinstance(d, int) else 2 for d in type.shape)


def _with_size(sketch: Sketch, wish: Kind, draw: Draw) -> Sketch:
    dims = sorted({d for t in sketch.inputs for d in t.shape or () if d is not None}, key=str)
    if not dims:
        raise DegenerateSample("there is no dimension")
    if wish.name == "not known":
        return forget(sketch, draw)
    old = draw.choice(dims)
    new: int | str = "N" if wish.name == "a name" else int(wish.name)
    if isinstance(old, int) and isinstance(new, int):
        return resize_to(sketch, old, new, draw)
    return sketch.with_inputs(
        t if t.shape is None else replace_dims(t, tuple(new if d == old else d for d in t.shape))
        for t in sketch.inputs
    )


def _with_rank(sketch: Sketch, wish: Kind, draw: Draw) -> Sketch:
    """The sketch with a dimension added or removed in one input, or in all inputs."""
    count = len(sketch.inputs)
    selected = range(count) if draw.chance(0.5) else [draw.integer(0, max(count - 1, 0))]
    inputs = list(sketch.inputs)
    front = draw.chance(0.7)
    for i in selected:
        shape = inputs[i].shape if i < count else None
        if shape is None or (wish.name == "lower" and not shape):
            continue
        more = draw.integer(1, 2)
        if wish.name == "higher":
            dims = (more, *shape) if front else (*shape, more)
        else:
            dims = shape[1:] if front else shape[:-1]
        inputs[i] = replace_dims(inputs[i], dims)
    return replace(sketch.with_inputs(inputs), shown_kinds=frozenset({wish}))


def _with_type(sketch: Sketch, dtype: DType) -> Sketch:
    """Change the type of all floats; without floats, of every tensor that has the type of the first input."""
    dtypes = {t.dtype for t in sketch.inputs} | {c.dtype for c in sketch.consts}
    old = FLOATS if dtypes & FLOATS else frozenset(t.dtype for t in sketch.inputs[:1])

    def changed(type: TensorType) -> TensorType:
        return TensorType(dtype, type.shape, type.const) if type.dtype in old else type

    with np.errstate(invalid="ignore", over="ignore"):
        consts = [
            SketchConst(c.array.astype(numpy_dtype(dtype)), dtype, c.opaque and dtype in FLOATS)
            if c.dtype in old
            else c
            for c in sketch.consts
        ]
    hidden = {at: changed(full) for at, full in sketch.hidden.items()}
    return replace(sketch, inputs=tuple(map(changed, sketch.inputs)), consts=tuple(consts), hidden=hidden)


def _grouped(
    sketch: Sketch, at: int, shapes: Sequence[tuple[int, ...] | None], wish: Kind, draw: Draw
) -> Sketch:
    """Make a convolution a grouped one: its weight gets fewer input channels. Raises DegenerateSample,
    UndefinedExpression.
    """
    node = sketch.nodes[at]
    if node.op != "Conv" or shapes[0] is None or shapes[1] is None or len(shapes[0]) < 2:
        raise DegenerateSample("its groups follow from more than the weight")
    channels, filters = shapes[0][1], shapes[1][0]
    options = [g for g in range(2, channels + 1) if channels % g == 0 and filters % g == 0]
    groups = 1 if wish.name == "1" else draw.choice(options) if options else 0
    if wish.name == "each channel by itself":
        groups = channels if channels in options else 0
    if not groups:
        raise UndefinedExpression("the channels cannot be grouped")
    shape = (filters, channels // groups, *shapes[1][2:])
    weight_ref = node.inputs[1]
    assert weight_ref is not None
    if weight_ref.kind == "const":
        old = sketch.consts[weight_ref.index]
        sketch = with_const(sketch, weight_ref.index, array=np.resize(old.array, shape))
    elif weight_ref.kind == "input":
        inputs = list(sketch.inputs)
        inputs[weight_ref.index] = replace_dims(inputs[weight_ref.index], shape)
        sketch = sketch.with_inputs(inputs)
    else:
        raise DegenerateSample("the weight is computed")
    return with_node(sketch, at, attrs={**node.attrs, "group": groups})


# Matches


def matched(case: Case) -> tuple[set[Kind], dict[str, int]]:
    """The kinds of its rule's declaration that a match shows, and the sizes of the declared dimensions by name."""
    match = case.match
    pattern = match.pattern
    if pattern is None:
        return set(), {}
    kinds = set[Kind]()
    if pattern.arity is not None:
        kinds.add(Kind("arity", str(pattern.arity)))
    if pattern.form is not None:
        kinds.add(Kind("form", str(pattern.form)))
    kinds.update(
        Kind(operator_subject(node), match.nodes[node.index].op)
        for node in pattern.nodes
        if len(node.ops) > 1
    )
    types: dict[str, TensorType] = {}
    for variable, value in zip(pattern.variables, match.values):
        if variable.name in pattern.optional:
            kinds.add(Kind(variable.name, "left out" if value == ABSENT else "given"))
        if value != ABSENT:
            types[variable.name] = case.before.type(value)
    for alternative in pattern.shapes:
        dims = _unified(alternative, types)
        if dims is not None:
            kinds.update(Kind(dimension_subject(n), str(size)) for n, size in dims.items() if size in (0, 1))
            return kinds, dims
    return kinds, {}


def _unified(alternative: Mapping[str, VarSpec], types: Mapping[str, TensorType]) -> dict[str, int] | None:
    """By name, those dimensions of a declared alternative that are numbers in these types; None if the alternative does
    not admit the types.
    """
    sizes: dict[str, int] = {}
    for name, type in types.items():
        spec = alternative.get(name)
        if spec is None or spec.dims is None:
            continue
        shape = type.shape
        if shape is None or (len(shape) < len(spec.dims) if spec.open else len(shape) != len(spec.dims)):
            return None
        for declared, got in zip(spec.dims, shape[len(shape) - len(spec.dims) :]):
            if isinstance(declared, int):
                if declared != got:
                    return None
            elif isinstance(got, int) and sizes.setdefault(declared, got) != got:
                return None
    return sizes


# Conditions


def own_conditions(rule: AnyRule) -> Mapping[Site, str]:
    """The calls of `require` in the source of a rule's class, by file and line, each with its reason as written.

    Empty if the class has no source file.
    """
    kind = type(rule)
    try:
        lines, first = inspect.getsourcelines(kind)
    except OSError:
        return {}
    file = inspect.getsourcefile(kind) or ""
    conditions: dict[Site, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
            reason = node.args[1]
            text = reason.value if isinstance(reason, ast.Constant) else ast.unparse(reason)
            conditions[file, first + node.lineno - 1] = str(text)
    return conditions
