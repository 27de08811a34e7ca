"""Valleys: networks that no single substitution improves, although a chain of substitutions does.

    from models.valleys import FAMILIES, Valley, catalogue
    for record in catalogue():              # every instance whose optimum is known
        start = record.valley.start()  # its state and cost, by the library and machine of this file
        ...                                 # search; record.optimum is the lowest known cost

A family is a builder `build(depth, width, seed)`. The network has `depth` valleys, each of which begins with `width`
substitutions that increase the cost; `seed` draws the sizes. Some families are pieces of networks in use (`real`), the
others are artificial. One family is held out of all training. Costs come from the roofline on a fixed machine, so they
are the same everywhere.

The composite rules in `COMPOSITES` cross a valley in one step. No search may use them here, nor the substitutes for
slow operators (`EXCLUDED`). `python -m models.valleys` writes the known instances to `valleys.json` (see `chart`). An
instance is listed only if, with every rule of the library except `EXCLUDED`,

- each candidate of the start increases the cost, so that greedy search stops at once;
- no state that can be reached without raising the cost by 2% is better than the start (among the `searched` states, see
  `ValleyRecord`);
- the chain to the first better graph begins with 1 to 4 steps that raise the cost, each by 2% to 20% of the start's.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from models.builder import Net
from rewrite_rules import LIBRARY, substitutes
from xrlflow.cost import Machine, Roofline
from xrlflow.cost.machine import REFERENCE
from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, Match, RewriteState, declared_in
from xrlflow.search import Limits, SearchNode, extend, joined, taso

# Composite rules and the chains of rules that they replace. Each composite rule crosses a valley of this file in one
# step.
COMPOSITES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {r.name: r.composite_of for r in LIBRARY if r.composite_of}
)

# Rules that no search may use in valleys: composites, and substitutes for slow operators, which gain next to a valley.
EXCLUDED = frozenset({*COMPOSITES, *(r.name for r in declared_in(substitutes))})

# Vectors of 2,048 bits (64 floats), the widest of Arm's SVE. A group of a convolution with fewer channels than lanes
# reaches less of the peak rate: 0.58 of the speed with half as many channels, as measured on machines with narrower
# vectors.
_LANES = 64
WIDE = replace(
    REFERENCE,
    name="wide vectors",
    lanes=_LANES,
    grouped=tuple((_LANES >> k, 0.23 * 0.58 ** (k - 1)) for k in range(6, 0, -1)),
)

# A machine with memory a third as fast, as on small boards: moving data costs more in proportion to computing.
SLOW = replace(
    REFERENCE,
    name="slow memory",
    cache_bandwidth=REFERENCE.cache_bandwidth / 3,
    memory_bandwidth=REFERENCE.memory_bandwidth / 3,
)


def valley_library() -> Library:
    """The library without the EXCLUDED rules, for all searches in valleys."""
    return Library(r for r in LIBRARY if r.name not in EXCLUDED)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of networks whose valleys are of one kind."""

    name: str
    build: Callable[[int, int, int], onnx.ModelProto]  # from depth, width and seed
    description: str
    rules: frozenset[str]  # rules of the chains that lead through a valley
    shapes: tuple[tuple[int, int], ...] = (
        (1, 1),
        (2, 1),
        (3, 1),
    )  # pairs of depth and width that have valleys
    real: bool = False  # pieces of networks in use
    held_out: bool = False
    machine: Machine = REFERENCE
    count: int = 30  # number of instances that the catalogue should have


@dataclass(frozen=True, slots=True)
class Valley:
    """One instance of a family."""

    family: Family
    depth: int
    width: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family.name}-{self.depth}x{self.width}-{self.seed}"

    def model(self) -> onnx.ModelProto:
        return self.family.build(self.depth, self.width, self.seed)

    def cost_model(self) -> Roofline:
        return Roofline(self.family.machine)

    def start(self, library: Library | None = None) -> SearchNode:
        """The state of the network and its modelled cost in seconds. The default library is `valley_library()`."""
        cost, graph = self.cost_model(), load(self.model()).graph
        state = RewriteState.start(graph, library or valley_library(), cost.delta)
        return SearchNode(state, None, cost.cost(graph))


# Pieces of networks in use


def _sizes(seed: int, *salt: int) -> Callable[[Sequence[int]], int]:
    """A function that draws one of several sizes."""
    rng = np.random.default_rng((seed, *salt))
    return lambda options: int(rng.choice(list(options)))


def _groups(net: Net, x: str, per_group: int, inner: int) -> str:
    """A bottleneck of ResNeXt. Its 3x3 convolution has `inner` channels, `per_group` in each group."""
    channels = net.shape(x)[1]
    y = net.relu(net.conv(x, inner, norm=1.0))
    y = net.relu(net.conv(y, inner, 3, groups=inner // per_group, norm=1.0))
    return net.relu(net.add(net.conv(y, channels, norm=0.7), x))


def resnext(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Bottlenecks with 4 channels in a group. With 8 channels in a group they are slower, with 16 faster."""
    net, draw = Net("resnext", seed), _sizes(seed, depth, 1)
    inner, image = draw((64, 96, 128, 192, 256)), draw((7, 10, 14, 20, 28))
    x = net.input("x", (1, draw((32, 48, 64, 96)), image, image))
    for block in range(depth):
        with net.scope("block", block):
            x = _groups(net, x, 4, inner)
    net.output(x, "y")
    return net.model()


def fire(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Fire modules of SqueezeNet, branches of Inception: a small kernel must be enlarged before two can be merged."""
    net, draw = Net("fire", seed), _sizes(seed, depth, 2)
    image = draw((14, 20, 28, 35))
    x = net.input("x", (1, draw((32, 64, 96)), image, image))
    for module in range(depth):
        with net.scope("fire", module):
            squeezed = net.relu(net.conv(x, draw((8, 12, 16)), 3, norm=1.0))
            kernel = [(1, 3), (3, 1), (3, 3)][draw((0, 1, 2))]
            small = net.conv(squeezed, draw((6, 8, 12)), norm=1.0)
            large = net.conv(squeezed, draw((4, 8, 20)), kernel, norm=1.0)
            x = net.relu(net.concat(small, large))
    net.output(x, "y")
    return net.model()


def downsampling(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Sums of two 1x1 convolutions, as over scales in HRNet and in ResNet's projections.

    One of the convolutions is strided; with `width` 2 both are. Before they can be merged, a strided convolution must
    become a convolution of stride 1 that reads a Slice.
    """
    net, draw = Net("downsampling", seed), _sizes(seed, depth, width, 3)
    out, image = draw((32, 48, 64, 96, 128)), draw((7, 10, 14, 20, 28))
    strides = (1, 2) if width == 1 else (2, 4)
    for unit in range(depth):
        with net.scope("fuse", unit):
            parts = []
            for k, stride in enumerate(strides):
                channels = draw((16, 32, 48, 64, 96, 128))
                x = net.input(f"x{unit}_{k}", (1, channels, image * stride, image * stride))
                parts.append(net.conv(x, out, stride=stride, norm=0.7))
            net.output(net.relu(net.add(*parts)), f"y{unit}")
    return net.model()


def scaled_sums(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Sums of convolutions, times a factor for each channel (LayerScale).

    The factor must be distributed over the sum before it can be folded into the convolutions.
    """
    net, draw = Net("scaled-sums", seed), _sizes(seed, depth, 4)
    image = draw((10, 14, 20, 28))
    for unit in range(depth):
        with net.scope("unit", unit):
            out = draw((32, 48, 64, 96))
            total = ""
            for k in range(draw((2, 2, 3))):
                x = net.input(f"x{unit}_{k}", (1, draw((4, 8, 16, 24)), image, image))
                # The kernels have different sizes, so that the sum is not simply one convolution.
                y = net.conv(x, out, (1, 3, 5)[k])
                total = net.add(total, y) if total else y
            gamma = net.weight("gamma", net.uniform((1, out, 1, 1), 0.5, 1.5))
            net.output(net.relu(net.mul(total, gamma)), f"y{unit}")
    return net.model()


def cells(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Cells of NasNet, where two or three 1x1 convolutions read the same image.

    Merging them adds a Split, and the cost falls only when the activations are moved above the Split.
    """
    net, draw = Net("cells", seed), _sizes(seed, depth, 11)
    for cell in range(depth):
        with net.scope("cell", cell):
            image = draw((14, 20, 28, 35))
            x = net.input(f"x{cell}", (1, draw((8, 16, 24, 32)), image, image))
            channels = draw((16, 32, 48))
            for k in range(draw((2, 3))):
                squeezed = net.relu(net.conv(x, channels, norm=0.75))
                net.output(net.conv(squeezed, channels, 3, groups=channels, norm=1.0), f"y{cell}_{k}")
    return net.model()


def adapters(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Linear residual layers before a narrow projection: (x + x @ a) @ z.

    Multiplied out, this is x @ (z + a @ z), where z + a @ z is a constant.
    """
    net, draw = Net("adapters", seed), _sizes(seed, depth, 5)
    rows = draw((16, 32, 64, 128))
    x = net.input("x", (1, rows, draw((96, 128, 192, 256))))
    for layer in range(depth):
        with net.scope("adapter", layer):
            hidden = net.add(x, net.project(x, net.shape(x)[-1], 0.3))
            x = net.tanh(net.project(hidden, draw((16, 32, 48, 64))))
            if layer < depth - 1:
                x = net.relu(net.linear(x, draw((96, 128, 192, 256))))
    net.output(x, "y")
    return net.model()


def layouts(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Transposes as converters from TensorFlow write them: an image is transposed for a factor with channels last, and
    back.

    If the factor is transposed instead, the image need not be transposed.
    """
    net, draw = Net("layouts", seed), _sizes(seed, depth, 6)
    image, channels = draw((5, 6, 7, 8, 10)), draw((16, 24, 32))
    x = net.input("x", (1, channels, image, image))
    for unit in range(depth):
        with net.scope("unit", unit):
            factor = net.input(
                f"s{unit}", (1, image, 1, channels) if draw((0, 1)) else (1, 1, image, channels)
            )
            last = net.transpose(x, 0, 2, 3, 1)
            x = net.transpose(net.node(("Mul", "Sub")[draw((0, 1))], last, factor), 0, 3, 1, 2)
            x = net.conv(x, channels, 3, norm=1.0)
    net.output(x, "y")
    return net.model()


# Artificial networks


def wide_groups(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Grouped convolutions for vectors of 64 lanes, with 64 / 2^(width + 1) channels in a group.

    Merging the groups in pairs raises the cost `width` times. After the next merge a group fills a vector, and the cost
    falls.
    """
    net, draw = Net("wide-groups", seed), _sizes(seed, depth, width, 7)
    inner, image = draw((128, 192, 256)), draw((7, 10, 14, 20))
    x = net.input("x", (1, _LANES, image, image))
    for block in range(depth):
        with net.scope("block", block):
            x = _groups(net, x, _LANES >> (width + 1), inner)
    net.output(x, "y")
    return net.model()


_MONOTONE = ("Sigmoid", "Tanh", "Relu", "Softplus")


def _tree(net: Net, leaves: Sequence[Callable[[], str]], op: str) -> str:
    """The root of a balanced tree of nodes `op` over the leaves. Calling a leaf adds its nodes to the network."""
    if len(leaves) == 1:
        return leaves[0]()
    half = len(leaves) // 2
    return net.node(op, _tree(net, leaves[:half], op), _tree(net, leaves[half:], op))


def gates(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Sums of two gated towers: (f(x @ u) * (x @ v)) @ w + (f(x @ u') * (x @ v')) @ w'.

    Before one product can compute both towers, each operand of one tower must be joined with that of the other by a
    Concat. A tower has 2^(width - 1) operands; with one operand there is no gate. The operator may be a maximum, not a
    product.
    """
    net, draw = Net("gates", seed), _sizes(seed, depth, width, 8)
    rows = draw((64, 96, 128, 192, 256))
    x = net.input("x", (1, rows, draw((2, 4, 8, 16))))
    for layer in range(depth):
        with net.scope("gates", layer):
            hidden, out = draw((256, 384, 512, 768)), draw((2, 4, 8, 16))
            op, acts = ("Mul", "Max")[draw((0, 1))], [_MONOTONE[draw(range(4))] for _ in range(2)]

            def leaf(k: int, x: str = x, hidden: int = hidden, acts: list[str] = acts) -> str:
                y = net.project(x, hidden)
                return net.node(acts[0], y) if k == 0 else y

            towers = [
                _tree(net, [functools.partial(leaf, k) for k in range(1 << (width - 1))], op)
                for _ in range(2)
            ]
            x = net.tanh(net.add(*[net.project(t, out) for t in towers]))
    net.output(x, "y")
    return net.model()


def forks(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """As `gates`, with 1x1 convolutions of an image instead of products; the operator may be a difference."""
    net, draw = Net("forks", seed), _sizes(seed, depth, width, 9)
    image = draw((10, 14, 20, 28))
    x = net.input("x", (1, draw((1, 2, 3, 4)), image, image))
    for layer in range(depth):
        with net.scope("fork", layer):
            hidden, out = draw((64, 96, 128, 192)), draw((8, 16))
            op, act = ("Mul", "Sub")[draw((0, 1))], _MONOTONE[draw(range(4))]

            def leaf(k: int, x: str = x, hidden: int = hidden, act: str = act) -> str:
                y = net.conv(x, hidden)
                return net.node(act, y) if k == 0 else y

            towers = [
                _tree(net, [functools.partial(leaf, k) for k in range(1 << (width - 1))], op)
                for _ in range(2)
            ]
            x = net.tanh(net.add(*[net.conv(t, out) for t in towers]))
    net.output(x, "y")
    return net.model()


def factored(depth: int, width: int, seed: int) -> onnx.ModelProto:
    """Two 1x1 convolutions with nothing between them, as after over-parameterised training.

    The convolutions must become products of matrices before their weights can be multiplied.
    """
    net, draw = Net("factored", seed), _sizes(seed, depth, 10)
    image = draw((10, 14, 20, 28))
    x = net.input("x", (1, draw((16, 32, 48)), image, image))
    for layer in range(depth):
        with net.scope("layer", layer):
            for channels in (draw((64, 96, 128)), draw((16, 32, 48))):
                fan_in = net.shape(x)[1]
                weight = net.normal((channels, fan_in, 1, 1), 1 / math.sqrt(fan_in))
                x = net.node("Conv", x, net.weight("weight", weight))
            x = net.relu(x)
    net.output(x, "y")
    return net.model()


_TOWERS = frozenset(
    {
        "MergeSumOfMatMuls",
        "MergeSumOfConvs",
        "PullBinaryOutOfConcat",
        "PullUnaryOutOfConcat",
        "PullProductOutOfConcatOfColumns",
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family(
                "resnext", resnext, "groups of 4 channels merged by two, twice", frozenset({"MergeGroupConv"}),
                real=True,
            ),
            Family(
                "fire", fire, "a kernel enlarged, then merged with another one",
                frozenset({"EnlargeConv", "PullProductOutOfConcatOfColumns", "MergeParallelConvs"}),
                real=True,
            ),
            Family(
                "downsampling", downsampling, "strides taken out of 1x1 convolutions, which are then merged",
                frozenset({"ReplaceConvStrideBySlice", "MergeSumOfConvs", "FoldSliceIntoConvStride"}),
                shapes=((1, 1), (1, 2), (2, 1), (2, 2)), real=True,
            ),
            Family(
                "scaled-sums", scaled_sums, "a factor distributed over a sum of convolutions",
                frozenset({"DistributeMulOverSum", "FoldScaleIntoConv"}), shapes=((1, 1), (2, 1)), real=True,
            ),
            Family(
                "cells", cells, "convolutions of one input merged, the Split passed down",
                frozenset({"MergeParallelConvs", "PullUnaryOutOfSplit", "MergeSplits"}),
                shapes=((1, 1), (2, 1)), real=True,
            ),
            Family(
                "adapters", adapters, "a residual product multiplied out",
                frozenset({"DistributeMatMul", "AssociateMatMulsRight", "FoldSumOfMatMuls"}), real=True,
            ),
            Family(
                "layouts", layouts, "a transpose pushed to the other operand",
                frozenset({"PushTransposesUp", "CancelTransposes"}), real=True,
            ),
            Family(
                "wide-groups", wide_groups, "groups merged by two, again and again",
                frozenset({"MergeGroupConv"}), machine=WIDE, count=64,
                shapes=tuple(itertools.product((1, 2), (1, 2, 3, 4))),
            ),
            Family(
                "gates", gates, "towers of products put side by side", _TOWERS, machine=SLOW, count=40,
                shapes=((1, 2), (1, 3), (2, 1), (2, 2)),
            ),
            Family(
                "factored", factored, "convolutions as products of matrices, multiplied out",
                frozenset({"ReplacePointwiseConvByMatMul", "MergeReshapes", "AssociateMatMulsLeft"}),
                shapes=((1, 2), (2, 2)),
            ),
            Family(
                "forks", forks, "towers of convolutions put side by side", _TOWERS, machine=SLOW, count=36,
                shapes=((1, 1), (1, 2), (1, 3)), held_out=True,
            ),
        )
    }
)  # fmt: skip

# The smallest and the largest step up, as parts of the start's cost, and the largest number of steps up of a chain.
MIN_STEP, MAX_STEP, MAX_STEPS = 0.02, 0.20, 4
# The smallest gain of an optimum, as a part of the start's cost.
MIN_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of visiting states in the order of the highest cost on the path to each."""

    best: SearchNode
    better: SearchNode | None  # the first state that costs less than the start
    climb: float  # the highest cost of a graph on the path to `better`, in seconds
    states: int  # number of visited states
    exhausted: bool  # all reachable states were visited


def explore(start: SearchNode, ceiling: float, budget: int) -> Exploration:
    """Visit up to `budget` states whose cost, and that of all states on the way, is at most `ceiling`.

    Paths whose highest cost is lower come first (Dijkstra's algorithm with the maximum instead of the sum). So no path
    to a better state has a lower highest cost than the path to `better`.
    """
    start = SearchNode(start.state, None, start.cost)
    best, better, climb = start, None, math.inf
    visited = {start.state.fingerprint}
    order = itertools.count()
    queue: list[tuple[float, int, SearchNode, Match | None]] = [(start.cost, next(order), start, None)]
    states = 0
    while queue and states < budget:
        height, _, node, match = heapq.heappop(queue)
        if match is not None:
            edit = node.state.edit(match)
            state = node.state.apply(match, edit)
            if state.fingerprint in visited:
                continue
            visited.add(state.fingerprint)
            cost = node.cost + match.delta
            node = SearchNode(state, extend(node.path, match, edit, cost), cost)
        states += 1
        if node.cost < best.cost * (1 - 1e-9):
            best = node
            if better is None:
                better, climb = node, height
        for candidate in node.state.candidates:
            expected = (node.state.fingerprint + candidate.shift) & FINGERPRINT_MASK
            top = max(height, node.cost + candidate.delta)
            if expected not in visited and top <= ceiling:
                heapq.heappush(queue, (top, next(order), node, candidate))
    return Exploration(best, better, climb, states, not queue)


@dataclass(frozen=True, slots=True)
class ValleyRecord:
    """An instance with its optimum, as the catalogue lists it. Costs are in seconds."""

    valley: Valley
    cost: float  # the start's cost
    optimum: float  # the lowest known cost
    chain: tuple[tuple[str, float], ...]  # the rules that lead to the optimum, with the cost after each
    # Of the chains to a better graph, the one with the lowest highest cost: its first steps, which raise the cost, as
    # parts of `cost`.
    climbs: tuple[float, ...]
    searched: int  # number of visited states
    exhausted: bool  # whether all states were visited that can be reached without a climb by `MIN_STEP`

    @property
    def height(self) -> float:
        """By how much the cost rises in total at the beginning of the chain, as a part of the start's cost."""
        return sum(self.climbs)

    def reached(self, cost: float, tolerance: float = 1e-3) -> bool:
        """Whether a cost is at most that of the optimum, within the tolerance."""
        return cost <= self.optimum * (1 + tolerance)


class NoValley(Exception):
    """The drawn sizes do not make a valley. The message says why."""


def chart(valley: Valley, budget: int = 400) -> ValleyRecord:
    """Search for an instance's optimum and the chain to it. Raises NoValley.

    The first search uses only the rules of the family, in up to 10 * `budget` states. From its best state, searches
    with the whole library go on until they find no better state. A search with the whole library also begins at the
    start. Each of these searches visits up to `budget` or 2 * `budget` states.
    """
    start = valley.start()
    cost = start.cost
    if min((m.delta for m in start.state.candidates), default=1.0) <= 1e-9 * cost:
        raise NoValley("a first step does not cost more")
    flat = explore(start, cost * (1 + MIN_STEP), budget)
    if flat.better is not None:
        raise NoValley("there is a path without climbing")
    narrow = Library(r for r in valley_library().rules.values() if r.name in valley.family.rules)
    guided = explore(valley.start(narrow), math.inf, 10 * budget)
    if guided.better is None:
        raise NoValley("the family's rules do not lead to anything better")
    climbs = _climbs(guided.better, cost)
    if not 1 <= len(climbs) <= MAX_STEPS:
        raise NoValley(f"{len(climbs)} steps up")
    if not all(MIN_STEP <= c <= MAX_STEP for c in climbs):
        raise NoValley(f"steps of {', '.join(f'{c:.1%}' for c in climbs)}")
    best, searched = _settled(_with_all_rules(start, guided.best), budget)
    direct = taso(start.state, cost, Limits(2 * budget), alpha=1.3)
    if direct.best.cost < best.cost * (1 - 1e-6):
        best, more = _settled(direct.best, budget)
        searched += more
    searched += flat.states + guided.states + direct.expanded
    if best.cost > (1 - MIN_GAIN) * cost:
        raise NoValley("little is gained")
    chain = tuple((s.rule, s.cost) for s in best.trace)
    return ValleyRecord(valley, cost, best.cost, chain, climbs, searched, flat.exhausted)


def _climbs(node: SearchNode, cost: float) -> tuple[float, ...]:
    """The steps at the beginning of a chain that raise the cost, as parts of the start's cost."""
    costs = [cost, *(s.cost for s in node.trace)]
    steps = [(b - a) / cost for a, b in itertools.pairwise(costs)]
    return tuple(itertools.takewhile(lambda step: step > 1e-9, steps))


def _with_all_rules(start: SearchNode, node: SearchNode) -> SearchNode:
    """A state from a search with some rules, now with the candidates of all rules."""
    state = start.state
    for step in node.trace:
        match = state.find(step.key)
        assert match is not None, "a narrower library has no other candidates"
        state = state.apply(match)
    return SearchNode(state, node.path, node.cost)


def _settled(node: SearchNode, budget: int) -> tuple[SearchNode, int]:
    """The best state that repeated searches around a state find, and the number of states visited."""
    searched = 0
    while True:
        wide = taso(node.state, node.cost, Limits(budget), alpha=1.2)
        local = explore(node, node.cost * 1.1, budget)
        searched += wide.expanded + local.states
        best = min((wide.best, local.best), key=lambda f: f.cost)
        if best.cost >= node.cost * (1 - 1e-6):
            return node, searched
        node = replace(best, path=joined(node.path, best.path))


# The catalogue

CATALOGUE = Path(__file__).with_name("valleys.json")


def catalogue(path: Path = CATALOGUE) -> tuple[ValleyRecord, ...]:
    """Every instance whose optimum is known."""
    return tuple(
        ValleyRecord(
            Valley(FAMILIES[row["family"]], row["depth"], row["width"], row["seed"]),
            row["cost"],
            row["optimum"],
            tuple((rule, cost) for rule, cost in row["chain"]),
            tuple(row["climbs"]),
            row["searched"],
            row["exhausted"],
        )
        for row in json.loads(path.read_text(encoding="utf-8"))
    )


def draws(
    family: Family, depth: int, width: int, count: int, tries: int, budget: int
) -> Iterator[ValleyRecord]:
    """The first `count` instances that have a valley, among the seeds from 0 to `tries` - 1."""
    number = 0
    for seed in range(tries):
        try:
            record = chart(Valley(family, depth, width, seed), budget)
        except NoValley:
            continue
        yield record
        number += 1
        if number == count:
            return


def as_row(record: ValleyRecord) -> dict[str, Any]:
    """An instance as a row of the catalogue."""
    valley = record.valley
    return {
        "family": valley.family.name,
        "depth": valley.depth,
        "width": valley.width,
        "seed": valley.seed,
        "cost": record.cost,
        "optimum": record.optimum,
        "climbs": [round(c, 4) for c in record.climbs],
        "chain": [list(step) for step in record.chain],
        "searched": record.searched,
        "exhausted": record.exhausted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Chart the valleys anew.")
    parser.add_argument("families", nargs="*", help="only these (default: all)")
    parser.add_argument("--tries", type=int, default=60, help="seeds to look at for each depth and width")
    parser.add_argument("--budget", type=int, default=400, help="states of each search")
    arguments = parser.parse_args()
    names = arguments.families or list(FAMILIES)
    rows = [as_row(c) for c in catalogue() if c.valley.family.name not in names] if CATALOGUE.exists() else []
    for name in names:
        family = FAMILIES[name]
        each = math.ceil(family.count / len(family.shapes))
        for depth, width in family.shapes:
            records = list(draws(family, depth, width, each, arguments.tries, arguments.budget))
            print(f"{name} {depth}x{width}: {len(records)} of {each}", flush=True)
            rows += [as_row(c) for c in records]
    order = list(FAMILIES)
    rows.sort(key=lambda r: (order.index(r["family"]), r["depth"], r["width"], r["seed"]))
    CATALOGUE.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
