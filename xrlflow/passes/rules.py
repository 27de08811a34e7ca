"""A compiler of ONNX graphs: a pass applies the rewrite rules of one family.

A pass repeatedly applies the match with the largest gain among all matches of its family that do not increase the
modelled cost. It ends when there is no such match, or when it has applied as many rules as the graph had nodes at
first. `operations` counts nodes, without the bodies of control flow; bytes and flops are those of `ops.work`.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b

import numpy as np

from xrlflow.backends.protocol import BackendError
from xrlflow.cost import CostModel, Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.onnxio.exporter import to_proto
from xrlflow.ops.work import work
from xrlflow.passes.compiler import Applied, Arrays, Comparison, CompilerError, Module, ModuleGraph, Summary
from xrlflow.passes.equality import compared
from xrlflow.rewrite import Library, RewriteState
from xrlflow.verify.inputs import InputPlan
from xrlflow.verify.runner import opened

_ROUNDS = 20  # limit on the repetitions of the default order
_GRAPHS = 256  # how many modules stay in memory as graphs


class RuleCompiler:
    """The families of a library as the passes of a `Compiler`. Comparing and timing models needs static shapes."""

    def __init__(self, library: Library, cost: CostModel | None = None) -> None:
        self._cost = cost if cost is not None else Roofline()
        families: dict[str, list[str]] = {}
        for name, rule in library.rules.items():
            families.setdefault(rule.family, []).append(name)
        self._libraries = {family: library.only(names) for family, names in families.items()}
        self._opcodes = tuple(sorted({*library.plans, *library.regions}))
        self._graphs: OrderedDict[str, tuple[ImportedModel, Graph]] = OrderedDict()

    @property
    def name(self) -> str:
        return f"rules {self._cost.name}"

    @property
    def passes(self) -> tuple[str, ...]:
        return tuple(self._libraries)

    @property
    def opcodes(self) -> tuple[str, ...]:
        """The operators that the library's rules mention."""
        return self._opcodes

    def load(self, source: str | bytes) -> Module:
        """Read the bytes of an ONNX file; a string is the path of a file."""
        try:
            imported = load(source)
        except ModelError as error:
            raise CompilerError(str(error)) from error
        return self._module(imported, imported.graph)

    def write(self, module: Module) -> bytes:
        """The bytes of an ONNX file."""
        return module.data

    def apply(self, module: Module, name: str) -> Applied:
        library = self._libraries.get(name)
        if library is None:
            raise CompilerError(f"there is no family {name!r}; there are: {', '.join(self._libraries)}")
        imported, graph = self._graph(module)
        after = self._swept(RewriteState.start(graph, library, self._cost.delta))
        if after.fingerprint == graph.fingerprint:
            return Applied(module, False)
        return Applied(self._module(imported, after), True)

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        return [self.apply(module, name) for name in names]

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        """The module after the passes of all families in the library's order, repeated until the number of operations
        stays the same.
        """
        selected = [name for name in self.passes if names is None or name in names]
        for _ in range(_ROUNDS):
            before = module.summary.operations
            for name in selected:
                module = self.apply(module, name).module
            if module.summary.operations == before:
                break
        return module

    def graph(self, module: Module) -> ModuleGraph:
        _, graph = self._graph(module)
        return _as_arrays(graph, {name: number for number, name in enumerate(self.opcodes)})

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        own_feeds = self._inputs(reference, seed)
        draws = [own_feeds, *(_named(own_feeds, arrays) for arrays in inputs)]
        outputs = []
        try:
            for data in (reference.data, module.data):
                with opened(data, optimized=False) as runner:
                    outputs.append([[np.asarray(o) for o in runner.run(feeds)] for feeds in draws])
        except BackendError as error:
            raise CompilerError(str(error)) from error
        return compared(outputs[0], outputs[1])

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        """Seconds in ONNX Runtime, with its optimiser. The first run of each module does not count."""
        times: list[list[float]] = [[] for _ in modules]
        inputs = self._inputs(modules[0], seed)
        with ExitStack() as stack:
            try:
                runners = [stack.enter_context(opened(m.data)) for m in modules]
                for repetition in range(repetitions + 1):
                    for runner, seconds in zip(runners, times):
                        begin = time.perf_counter()
                        runner.run(inputs)
                        if repetition:
                            seconds.append(time.perf_counter() - begin)
            except BackendError as error:
                raise CompilerError(str(error)) from error
        return [tuple(seconds) for seconds in times]

    def _swept(self, state: RewriteState) -> Graph:
        visited = {state.fingerprint}
        for _ in range(state.graph.node_count):
            fitting = [m for m in state.candidates if m.delta <= 0.0]
            if not fitting:
                break
            match = min(fitting, key=lambda m: (m.delta, m.key))
            edit, delta = state.priced(match)
            if delta > 0.0:  # earlier edits of neighbouring nodes have changed the gain
                break
            state = state.apply(match, edit)
            if state.fingerprint in visited:
                break
            visited.add(state.fingerprint)
        return state.graph

    def _inputs(self, module: Module, seed: int) -> dict[str, object]:
        imported, _ = self._graph(module)
        plan = InputPlan.of(imported)
        if plan.dynamic:
            raise CompilerError(f"{imported.name} has inputs of symbolic sizes: fix its shapes to run it")
        return dict(plan.case({}, seed, 0).feeds)

    def _module(self, imported: ImportedModel, graph: Graph) -> Module:
        digest = blake2b(str(graph.fingerprint).encode() + _interface(imported), digest_size=16).hexdigest()
        self._graphs[digest] = imported, graph
        self._graphs.move_to_end(digest)
        while len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return Module(digest, to_proto(imported, graph).SerializeToString(), _summary(graph))

    def _graph(self, module: Module) -> tuple[ImportedModel, Graph]:
        model_and_graph = self._graphs.get(module.digest)
        if model_and_graph is None:
            try:
                imported = load(module.data)
            except ModelError as error:
                raise CompilerError(str(error)) from error
            model_and_graph = self._graphs[module.digest] = imported, imported.graph
        return model_and_graph


def _interface(imported: ImportedModel) -> bytes:
    """The parts of a model that a graph's fingerprint does not cover: names and types of inputs and outputs, in order,
    and functions.
    """
    frame = imported.frame
    parts = (*frame.graph.input, *frame.graph.output, *frame.functions)
    return repr([part.SerializeToString(deterministic=True) for part in parts]).encode()


def _named(feeds: Mapping[str, object], arrays: Arrays) -> dict[str, object]:
    """The arrays by the names of the inputs, in their order."""
    if len(arrays) != len(feeds):
        raise CompilerError(f"{len(arrays)} inputs are given, and the model has {len(feeds)}")
    return dict(zip(feeds, arrays))


def _summary(graph: Graph) -> Summary:
    works = [work(n, [graph.type(v) if v else None for v in n.inputs], {}) for n in graph.nodes()]
    opcodes = Counter(node.op for node in graph.nodes())
    count = graph.node_count
    return Summary(
        count,
        sum(w.bytes for w in works),
        sum(w.flops for w in works),
        tuple(sorted(opcodes.items())),
        (count,),
    )


def _as_arrays(graph: Graph, numbers: dict[str, int]) -> ModuleGraph:
    nodes = graph.topological()
    index_of = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    outputs = set(graph.outputs)
    x = np.zeros((len(nodes), 6), np.float32)
    edges = []
    for index, node in enumerate(nodes):
        type = graph.type(node.outputs[0])
        is_output = not outputs.isdisjoint(node.outputs)
        x[index, :5] = (type.size or 0, type.nbytes or 0, len(type.shape or ()), is_output, is_output)
        edges += [(index_of[v], index, min(i, 6)) for i, v in enumerate(node.inputs) if v in index_of]
    table = np.array(edges, np.int64).reshape(-1, 3)
    x[:, 5] = np.bincount(table[:, 0], minlength=len(nodes))
    x[:, (0, 1, 5)] = np.log2(1.0 + x[:, (0, 1, 5)])
    opcode = np.array([numbers.get(node.op, len(numbers)) for node in nodes], np.int64)
    return ModuleGraph(opcode, x, np.ascontiguousarray(table[:, :2].T), table[:, 2].copy())
