"""The compiler's own order without the passes that do not reduce the metric: a control without a search for orders."""

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
    """The passes of the compiler's own order that reduce the metric of these modules.

    From the first to the last, a pass is dropped if the remaining ones, in the compiler's own order repeated to its
    fixpoint, reduce the metric as much without it (by the geometric mean over the modules). That is repeated until no
    pass is dropped. `say` receives a line for each dropped pass. Raises CompilerError if the whole order fails.
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
            except CompilerError:  # another pass fails without this one, so this one stays
                continue
            if value <= least + 1e-12:
                kept, least = fewer, value
                if say is not None:
                    say(f"without {name}: {math.exp(least / len(modules)):.1f} operations")
    return tuple(kept)
