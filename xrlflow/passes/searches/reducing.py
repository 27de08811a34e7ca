"""The compiler's own order without the passes that do not reduce: a control that looks for no order at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from xrlflow.passes.compiler import Compiler, CompilerError, Metric, Module


def reducing(
    compiler: Compiler,
    modules: Sequence[Module],
    metric: Metric = Metric.OPERATIONS,
    say: Callable[[str], None] | None = None,
) -> tuple[str, ...]:
    """The passes of the compiler's own order that are of use to these modules.

    From the first to the last, a pass is dropped if the rest, in the compiler's own order repeated to its fixpoint,
    leaves no more of the metric without it (the geometric mean over the modules). That is repeated until no pass is
    dropped. `say` is told of each pass that is. Raises CompilerError if the whole order fails.
    """

    def left(names: Sequence[str]) -> float:
        return math.fsum(
            math.log(max(compiler.default(module, names).summary.of(metric), 1e-30)) for module in modules
        )

    kept, least = list(compiler.passes), left(compiler.passes)
    before = 0
    while len(kept) != before:
        before = len(kept)
        for name in tuple(kept):
            fewer = [other for other in kept if other != name]
            try:
                value = left(fewer)
            except CompilerError:  # another pass fails without this one
                continue
            if value <= least + 1e-12:
                kept, least = fewer, value
                if say is not None:
                    say(f"without {name}: {math.exp(least / len(modules)):.1f} operations")
    return tuple(kept)
