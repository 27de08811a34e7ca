"""XLA's HLO passes on the CPU, one at a time, in worker processes (`hlo_passes` lists the passes and defines what one
pass is).

A module is a serialized HloModuleProto after XLA's importer, as the next pass, and finally XLA's compiler, will see
it. This process does not load jaxlib; workers do, because some passes abort the process if certain other passes have
not run before. Such a pass counts as failed, and the module stays as it was.

`operations` counts the live instructions of all computations that are used, without parameters, constants, tuples and
their elements (see `hlo.counts`). Bytes and flops are those of XLA's cost analysis.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from xrlflow.backends.limits import available_memory, default_threads
from xrlflow.cost.machine import cpu_name
from xrlflow.passes import hlo, hlo_passes
from xrlflow.passes.cache import Cache, Outcome
from xrlflow.passes.compiler import Applied, Arrays, Comparison, CompilerError, Module, ModuleGraph, Summary
from xrlflow.passes.equality import alike, compared, in_reals, in_types
from xrlflow.passes.hlo_passes import default_order, only
from xrlflow.passes.inputs import Array, Draw, Floats, Inputs, given
from xrlflow.passes.pool import Died, Pool
from xrlflow.passes.worker import (
    Execute,
    Executed,
    Load,
    Loaded,
    Options,
    Print,
    Refusal,
    Transform,
    Whole,
    Wide,
    Xla,
)
from xrlflow.workers import MakeHandler

if TYPE_CHECKING:
    from typing_extensions import Self

Outputs: TypeAlias = tuple[tuple[Array, ...], ...]
_Draws: TypeAlias = tuple[Inputs, ...]

# A version number, incremented when a change of the code makes a pass give another module, or other figures, than
# before. The cache ignores results with an earlier number.
_SEMANTICS = 3
_IDLE = 50_000  # modules whose passes without effect are remembered
# The kinds of random inputs in a comparison. There are several, as running a module takes little time compared with
# compiling it.
_DRAWS = (Floats.NORMAL, Floats.NORMAL, Floats.POSITIVE, *(3 * (Floats.SPARSE,)))
# How often the movement of outputs is observed: with changed inputs, and in float64 with changed constants as well,
# where each observation needs a compilation.
_NUDGES, _WIDE_NUDGES = 16, 4
_RANDOM = frozenset({"rng", "rng-get-and-update-state"})
_TALKING = frozenset({"infeed", "outfeed", "recv", "recv-done", "send", "send-done"})
_REFERENCES = 24  # the number of modules whose outputs stay in memory
_ROUNDS = 20  # limit on the repetitions of the default order


@dataclass(frozen=True, slots=True)
class XlaOptions:
    """The limits of the compiler."""

    workers: int = field(default_factory=default_threads)  # processes that run passes
    seconds: float = 60.0  # the time limit of a pass
    remember: int = 1 << 27  # bytes of modules that stay in memory


class _NotWide(Exception):
    """A module has no counterpart in float64, or it does not run."""


class XlaCompiler:
    """The HLO passes of the installed jaxlib as a `Compiler`. Use it in a `with` statement, or close it.

    `cache`: stores results between runs of programs; None: no cache. `passes`: the names of the compiler's passes, by
    default all. Raises CompilerError if jax is missing, or a pass does not exist.
    """

    def __init__(
        self,
        options: XlaOptions | None = None,
        cache: Cache | None = None,
        passes: Sequence[str] | None = None,
        make: MakeHandler = Xla,
    ) -> None:
        self.options = options if options is not None else XlaOptions()
        self._name = f"xla {_version()} v{_SEMANTICS}"
        # The key names the processor, because the effect of some passes depends on it.
        self._key = f"{self._name}, {cpu_name()}"
        self._cache = cache
        self._known = {p.name: p for p in hlo_passes.PASSES}
        self._passes = tuple(self._known) if passes is None else tuple(passes)
        for name in self._passes:
            self._check(name)
        self._pool = Pool(
            make,
            self.options.workers,
            self.options.seconds,
            variables={
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_X64": "1",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "XLA_FLAGS": "",  # the user's flags would change the effects of passes
            },
        )
        self._modules: OrderedDict[str, Module] = OrderedDict()
        self._remembered = 0
        self._idle: dict[str, frozenset[str]] = {}
        self._references: OrderedDict[tuple[str, _Draws, Wide | None], Outputs] = OrderedDict()
        self._comparisons: dict[tuple[str, str, bytes], Comparison] = {}
        self.steps = 0
        """The number of passes that workers ran, without passes whose results came from the cache."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def passes(self) -> tuple[str, ...]:
        return self._passes

    @property
    def opcodes(self) -> tuple[str, ...]:
        return hlo.OPCODES

    @property
    def crashes(self) -> int:
        """The number of workers that passes have crashed so far."""
        return self._pool.deaths

    def load(self, source: str | bytes) -> Module:
        """Read HLO text ("HloModule ..."), StableHLO text or bytecode, or a serialized HloModuleProto."""
        if not source.strip():
            raise CompilerError("the module is empty")
        return _module(self._answer(Load(source)))

    def write(self, module: Module) -> str:
        """The module as HLO text."""
        text: str = self._answer(Print(module.data))
        return text

    def apply(self, module: Module, name: str) -> Applied:
        return self.apply_each(module, [name])[0]

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        for name in names:
            self._check(name)
        idle = self.without_effect(module)
        results: dict[str, Applied | None] = {}
        for name in dict.fromkeys(names):
            results[name] = Applied(module, False) if name in idle else self._remember(module, name)
        missing = [name for name, result in results.items() if result is None]
        passes = [self._known[name] for name in missing]
        requests = [Transform(module.data, module.digest, only(p), p.unbatched) for p in passes]
        self.steps += len(requests)
        for name, reply in zip(missing, self._pool.ask_each(requests)):
            results[name] = self._settled(module, name, reply)
        return [result for name in names if (result := results[name]) is not None]

    def without_effect(self, module: Module) -> frozenset[str]:
        """The passes that need kinds of instructions that the module lacks."""
        idle = self._idle.get(module.digest)
        if idle is None:
            kinds = {kind for kind, _ in module.summary.opcodes}
            ordinary = hlo.is_ordinary(hlo.parse(module.data))
            idle = frozenset(
                p.name
                for p in self._known.values()
                if (p.needs and kinds.isdisjoint(p.needs)) or (p.unusual and ordinary)
            )
            if len(self._idle) >= _IDLE:
                self._idle.clear()
            self._idle[module.digest] = idle
        return idle

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        """The module after XLA's own pipelines up to the assignment of layouts, with only the passes of this compiler
        (or `names`), repeated until the number of operations stays the same (at most 20 times).
        """
        for name in names or ():
            self._check(name)
        options = default_order(self._passes if names is None else names)
        for _ in range(_ROUNDS):
            after = self._ordered(module, options)
            if after is None or after.summary.operations == module.summary.operations:
                return module if after is None else after
            module = after
        return module

    def default_once(self, module: Module) -> Module:
        """The module after XLA's own pipelines, with only the passes of this compiler, run once as in a compilation."""
        return self._ordered(module, default_order(self._passes)) or module

    def whole(self, module: Module) -> Summary:
        """Figures of the module after all of XLA's passes, with layouts and fusion. They are not comparable with the
        figures after `default`: an instruction that is fused with several readers is computed, and counted, once for
        each.
        """
        summary: Summary = self._answer(Whole(module.data))
        return summary

    def graph(self, module: Module) -> ModuleGraph:
        return hlo.graph(hlo.parse(module.data))

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        """See `equality`. Modules without a counterpart in float64 are compared in their own types only."""
        _check_alone(reference)
        draws: _Draws = tuple(
            Draw(len(_DRAWS) * seed + number, distribution) for number, distribution in enumerate(_DRAWS)
        )
        draws += tuple(given(arrays) for arrays in inputs)
        key = reference.digest, module.digest, blake2b(pickle.dumps(draws)).digest()
        if key not in self._comparisons:
            self._comparisons[key] = self._compared(reference, module, draws)
        return self._comparisons[key]

    def _compared(self, reference: Module, module: Module, draws: _Draws) -> Comparison:
        expected, actual = self._expected(reference, draws), self._outputs(reference, module, draws)
        if not alike(expected, actual):
            return compared(expected, actual)
        try:
            exact = self._expected(reference, draws, Wide())
            wide = self._outputs(reference, module, draws, Wide())
            first = in_reals(exact, wide, lambda: self._moved(reference, draws, wide=True), expected[0])
        except _NotWide as why:
            alone = in_types(expected, actual, None, lambda: self._moved(reference, draws, wide=False))
            narrow = f"{alone.difference} (in its own types alone: {why})"
            return alone if alone.equal else replace(alone, difference=narrow)
        if not first.equal:
            return replace(first, difference=f"{first.difference} (in float64)")
        second = in_types(expected, actual, exact, lambda: self._moved(reference, draws, wide=False))
        if not second.equal:
            return second
        return replace(first, note=second.note, worst=max(first.worst, second.worst))

    def _moved(self, reference: Module, draws: _Draws, wide: bool) -> list[Outputs]:
        """The outputs of a reference, several times, each with inputs changed by one unit in the last place (in
        float64 with changed constants, too).
        """

        def moved(nudge: int) -> _Draws:
            return tuple(replace(d, nudge=nudge) for d in draws)

        if wide:
            nudges = range(1, 1 + _WIDE_NUDGES)
            return [self._expected(reference, moved(n), Wide(n)) for n in nudges]
        several = sum((moved(n) for n in range(1, 1 + _NUDGES)), ())
        outputs = self._expected(reference, several)
        return [outputs[n : n + len(draws)] for n in range(0, len(outputs), len(draws))]

    def _expected(self, reference: Module, draws: _Draws, wide: Wide | None = None) -> Outputs:
        """The outputs of a reference on each draw. The outputs of the latest references stay in memory."""
        key = reference.digest, draws, wide
        outputs = self._references.get(key)
        if outputs is None:
            outputs = self._references[key] = self._outputs(reference, reference, draws, wide)
            if len(self._references) > _REFERENCES:
                self._references.popitem(last=False)
        return outputs

    def _outputs(self, like: Module, module: Module, draws: _Draws, wide: Wide | None = None) -> Outputs:
        self._check_room(like, len(draws) * (1 if wide is None else 2))
        request = Execute(like.data, (module.data,), draws, quick=True, wide=wide)
        if wide is None:
            executed: Executed = self._answer(request)
            return executed.outputs[0]
        reply = self._pool.ask(request)
        if not isinstance(reply, Executed):
            raise _NotWide(reply.reason if isinstance(reply, Died) else reply.error)
        return reply.outputs[0]

    def _check_room(self, module: Module, times: int) -> None:
        """Raise CompilerError if inputs and outputs need more memory than is free. (A system that overcommits memory
        would kill the program later.)"""
        # Inputs and outputs exist three times: in a worker, in transfer, and in this process.
        needed = 3 * times * hlo.interface_bytes(hlo.parse(module.data))
        if needed > available_memory():
            self._references.clear()
            if needed > (free := available_memory()):
                raise CompilerError(
                    f"to compare outputs takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
                )

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        """Seconds of the modules compiled with XLA's default options, which run all of XLA's passes.

        The first run of each module, which gives its outputs, does not count.
        """
        _check_alone(modules[0])
        executed: Executed = self._answer(
            Execute(modules[0].data, tuple(m.data for m in modules), (Draw(seed),), repetitions)
        )
        return list(executed.seconds)

    def close(self) -> None:
        """End the workers. The cache stays open, as it belongs to the caller."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, name: str) -> None:
        if name not in self._known:
            raise CompilerError(f"XLA has no pass {name!r}; there are: {', '.join(self._known)}")

    def _answer(self, request: Any) -> Any:
        """The reply to a request that must not fail. Raises CompilerError if it does."""
        reply = self._pool.ask(request)
        match reply:
            case Refusal(error, _):
                raise CompilerError(error)
            case Died(reason):
                raise CompilerError(reason)
        return reply

    def _ordered(self, module: Module, options: Options) -> Module | None:
        reply: Loaded | None = self._answer(Transform(module.data, module.digest, options))
        return None if reply is None else _module(reply)

    def _remember(self, module: Module, name: str) -> Applied | None:
        """The remembered result of a pass on a module; None if there is none."""
        if self._cache is None:
            return None
        outcome = self._cache.outcome(self._key, module.digest, name)
        if outcome is None:
            return None
        if outcome.after == module.digest:
            return Applied(module, False, outcome.error)
        after = self._modules.get(outcome.after)
        if after is None and (after := self._cache.module(self._key, outcome.after)) is None:
            return None
        self._keep(after)
        return Applied(after, True)

    def _settled(self, module: Module, name: str, reply: Any) -> Applied:
        match reply:
            case Loaded():
                applied = Applied(_module(reply), True)
            case None:
                applied = Applied(module, False)
            case Refusal(error, lasting):
                applied = Applied(module, False, error)
                if not lasting:
                    return applied
            case Died(reason):
                applied = Applied(module, False, reason)
                ended = "SIGABRT" in reason or "SIGSEGV" in reason
                if not ended or "bad_alloc" in reason:
                    return applied  # not stored: with more time or memory the pass may succeed
            case _:
                raise CompilerError(f"a worker gave an unexpected answer: {reply!r}")
        if self._cache is not None:
            new = applied.module if applied.changed else None
            outcome = Outcome(applied.module.digest, applied.error)
            self._cache.put(self._key, module.digest, name, outcome, new)
            self._keep(applied.module)
        return applied

    def _keep(self, module: Module) -> None:
        """Keep a module in memory, and drop those that were not used for longest."""
        if module.digest not in self._modules:
            self._remembered += len(module.data)
        self._modules[module.digest] = module
        self._modules.move_to_end(module.digest)
        while self._remembered > self.options.remember and len(self._modules) > 1:
            _, oldest = self._modules.popitem(last=False)
            self._remembered -= len(oldest.data)


def _check_alone(module: Module) -> None:
    """Raise CompilerError for a module that needs other programs, or whose results differ in each run."""
    for kind, _ in module.summary.opcodes:
        if kind in _RANDOM:
            raise CompilerError(
                f"the module's {kind} draws other numbers in each run: results cannot be compared"
            )
        if kind in _TALKING:
            raise CompilerError(f"the module's {kind} waits for another program: it cannot be run alone")


def _module(loaded: Loaded) -> Module:
    return Module(loaded.digest, loaded.data, loaded.summary)


def _version() -> str:
    """The version of jaxlib. Raises CompilerError if jax is missing."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jaxlib") is None:
        raise CompilerError("XLA's passes need jax: install it with `pip install 'xrlflow[xla]'`")
    return f"jaxlib {importlib.metadata.version('jaxlib')}"
