"""Compare several searches on one model: `python examples/compare_strategies.py [MODEL.onnx]`"""

from __future__ import annotations

import sys

import onnx
from slow_model import slow_model

import xrlflow


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "slow.onnx"
    if len(sys.argv) == 1:
        onnx.save(slow_model(), path)

    # Leave measure=False out to compare latencies instead of modelled costs; it takes `time_limit` for each search.
    found = xrlflow.compare(
        path,
        searches=("greedy", "taso", "lookahead2", "random"),
        cost="roofline",
        time_limit=5,
        measure=False,
    )
    for report in found.reports:
        print(f"{report.search:12} modelled cost {report.cost_before:.3e} -> {report.cost_after:.3e} s")


if __name__ == "__main__":
    main()
