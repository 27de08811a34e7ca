"""The compiler's own order without the passes that do not reduce the metric. It shows what is possible without a
search for orders.
"""

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
    fixpoint, reduce the metric as much without it (by the geometric mean over the modules). This procedure is repeated
    until no pass is dropped. `say` receives a line for each dropped pass. Raises CompilerError if the whole order
    fails.
    """

    def value_of(names: Sequence[str]) -> float:
        return math.fsum(
            math.log(max(compiler.default(module, names).summary.of(metric), 1e-30)) for module in modules
        )

    remaining, lowest = list(compiler.passes), value_of(compiler.passes)
    before = 0
    while len(remaining) != before:
        before = len(remaining)
        for name in tuple(remaining):
            fewer = [other for other in remaining if other != name]
            try:
                value = value_of(fewer)
            except CompilerError:  # another pass fails without this one, so this one stays
                continue
            if value <= lowest + 1e-12:
                remaining, lowest = fewer, value
                if say is not None:
                    say(f"without {name}: {math.exp(lowest / len(modules)):.1f} operations")
    return tuple(remaining)
