"""Make a model faster: `python examples/optimize_a_file.py [MODEL.onnx]`. The result is MODEL.fast.onnx."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
from slow_model import slow_model

import xrlflow


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "slow.onnx")
    if len(sys.argv) == 1:
        onnx.save(slow_model(), path)

    # Greedy search is quick. The default, search="xrlflow", also passes through slower graphs to faster ones.
    result = xrlflow.optimize(path, search="greedy", time_limit=15)

    for step in result.trace:
        print("applied", step.rule)
    if result.returned_original:
        print("nothing was clearly faster: the result is the original")
    else:
        faster = result.speedup
        print("verified:", result.report.verified)
        if faster is not None:
            print(
                f"measured: {faster.median:.2f} times as fast, 95% interval [{faster.low:.2f}, {faster.high:.2f}]"
            )
    output = path.with_suffix(".fast.onnx")
    result.save(output)
    print("wrote", output)


if __name__ == "__main__":
    main()
