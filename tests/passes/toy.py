"""A compiler of words, for fast tests: a letter is an operation, a pass replaces a part of the word everywhere.

To make "b b" shorter, a pass must first make it longer (`open`), so greedy choice ends at once: a valley.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from xrlflow.passes import Applied, Comparison, CompilerError, Module, ModuleGraph, Summary
from xrlflow.passes.compiler import Arrays

# bb -open-> acaaca -merge-> acaca -drop-> aa -merge-> a
RULES: dict[str, tuple[str, str]] = {
    "merge": ("aa", "a"),
    "noise": ("d", "dd"),
    "open": ("b", "aca"),
    "idle": ("y", ""),
    "drop": ("cac", ""),
    "tidy": ("dd", "d"),
    "fail": ("", ""),
}


class Words:
    """Words of the letters a, b, c, d, e. `wrong`: a pass that makes every word "e", which computes something else.

    It foresees that "idle" has no effect.
    """

    opcodes = ("a", "b", "c", "d", "e")

    def __init__(self, wrong: bool = False) -> None:
        self.passes = (*RULES, "wrong") if wrong else tuple(RULES)
        self.name = "words"
        self.steps = 0

    def load(self, source: str | bytes) -> Module:
        word = source.decode() if isinstance(source, bytes) else source
        for position, letter in enumerate(word):
            if letter not in self.opcodes:
                raise CompilerError(f"column {position + 1}: unknown letter {letter!r}")
        counts = tuple(sorted(Counter(word).items()))
        return Module(word, word.encode(), Summary(len(word), 4.0 * len(word), 0.0, counts, (len(word),)))

    def write(self, module: Module) -> str:
        return module.digest

    def apply(self, module: Module, name: str) -> Applied:
        self.steps += 1
        if name == "fail":
            return Applied(module, False, "it always fails")
        if name == "wrong" and name in self.passes:
            word = "e"
        elif name in RULES:
            word = module.digest.replace(*RULES[name]) if len(module.digest) < 60 else module.digest
        else:
            raise CompilerError(f"there is no pass {name!r}")
        return (
            Applied(self.load(word), word != module.digest)
            if word != module.digest
            else Applied(module, False)
        )

    def without_effect(self, module: Module) -> frozenset[str]:
        return frozenset({"idle"})

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        return [self.apply(module, name) for name in names]

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        """Rules "merge" and "tidy" to the fixpoint; with names, all of these in the order of the passes."""
        chosen = ("merge", "tidy") if names is None else [n for n in self.passes if n in names]
        for _ in range(20):
            before = module
            for name in chosen:
                old, new = RULES.get(name, ("", ""))
                module = self.load(module.digest.replace(old, new)) if old else module
            if len(module.digest) == len(before.digest):
                break
        return module

    def graph(self, module: Module) -> ModuleGraph:
        letters = np.array([self.opcodes.index(c) for c in module.digest], np.int64)
        count = len(letters)
        edges = (
            np.stack([np.arange(count - 1), np.arange(1, count)]) if count > 1 else np.zeros((2, 0), np.int64)
        )
        return ModuleGraph(
            letters, np.ones((count, 6), np.float32), edges, np.zeros(edges.shape[1], np.int64)
        )

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        if "e" in module.digest and "e" not in reference.digest:
            return Comparison(False, np.inf, 1.0, "output 0: an e")
        return Comparison(True, 0.0, 1.0)

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        return [(float(len(m.digest)),) * repetitions for m in modules]


VALLEY = "dbbd"
"""4 operations. The best is "dad", after open, merge, drop, merge; nothing else is shorter than the word itself."""
