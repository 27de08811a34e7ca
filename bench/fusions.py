"""The fusions of ONNX Runtime's optimizer for transformers, each alone: `python bench/fusions.py [NAMES] [--write]`.

Each export of `models.exports` in its open form is given to that optimizer once for each of its fusions, with all
others off but those that the fusion begins from. A file that has its operators of com.microsoft is measured in turns
with the original in one process, at one size: a ratio above 1 is faster, the original against itself is the control
(A/A). It holds this machine's lock of measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

from bench import pages
from bench.latency import cell, circumstances, ratios
from bench.open_dimensions import sizes_of
from models import exports
from xrlflow.storage.exclusive import measuring

Row = dict[str, Any]
FUSIONS = (
    "gelu", "layer_norm", "attention", "rotary_embeddings", "skip_layer_norm", "embed_layer_norm",
    "bias_skip_layer_norm", "bias_gelu", "gelu_approximation",
)  # fmt: skip
_NEEDS = {"bias_skip_layer_norm": ("layer_norm", "skip_layer_norm"), "skip_layer_norm": ("layer_norm",),
          "embed_layer_norm": ("layer_norm", "skip_layer_norm", "attention"), "bias_gelu": ("gelu",),
          "attention": ("layer_norm", "skip_layer_norm"), "gelu_approximation": ("gelu", "bias_gelu")}  # fmt: skip
"""What has to be on as well: a fusion begins at what another one made."""
NAMES = (
    "minilm",
    "t5-encoder",
    "modernbert",
    "deberta",
    "clip-text",
    "whisper-encoder",
    "qwen3-step",
    "llama-step",
)
_MAKES = {
    "attention": "Attention",
    "embed_layer_norm": "EmbedLayerNormalization",
    "rotary_embeddings": "RotaryEmbedding",
    "gelu_approximation": "FastGelu",
}
"""The operator of a fusion without which its file is another fusion's."""
TABLE = "fusions"


def fused(path: str, target: str, fusion: str) -> dict[str, int]:
    """Write what one fusion makes of a file. Returns the operators of com.microsoft that it added, by name."""
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    chosen = FusionOptions("bert")
    on = {fusion, *_NEEDS.get(fusion, ())}
    for each in FUSIONS:
        setattr(chosen, f"enable_{each}", each in on)
    optimizer.optimize_model(
        path, model_type="bert", opt_level=0, optimization_options=chosen
    ).save_model_to_file(target)
    nodes = onnx.load(target, load_external_data=False).graph.node
    made = Counter(node.op_type for node in nodes if node.domain)
    return dict(made) if any(_MAKES.get(fusion, "") in op for op in made) else {}


def measured(name: str, threads: int, seconds: float) -> list[Row]:
    """A row for each fusion that adds operators."""
    rows: list[Row] = []
    *_, sizes = list(sizes_of(name))[:3]
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as folder:
        path = str(Path(folder) / "open.onnx")
        onnx.save(exports.export(name, open=True), path)
        for fusion in FUSIONS:
            row: Row = {"name": name, "fusion": fusion, "threads": threads, "at": sizes} | circumstances()
            try:
                row["made"] = fused(path, target := str(Path(folder) / f"{fusion}.onnx"), fusion)
                if row["made"]:
                    feeds = exports.inputs(name, sizes=sizes)
                    row |= ratios(path, {fusion: target}, feeds, threads, seconds)
            except Exception as error:  # a rival's failure is a result, too
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = ["| export | fusion | made | A/A | original / fused |", "|---|---|---|---|---|"]
    for row in rows:
        made = ", ".join(f"{op} {n}" for op, n in sorted(row.get("made", {}).items()))
        if "control" in row:
            lines.append(
                f"| {row['name']} | {row['fusion']} | {made} | {cell(row['control'])} | {cell(row[row['fusion']])} |"
            )
        elif "failed" in row:
            lines.append(f"| {row['name']} | {row['fusion']} | fails | | |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="exports")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each measurement")
    parser.add_argument("--write", action="store_true", help=f"put the table {TABLE} into docs/benchmarks")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)):
        for name in options.names or NAMES:
            rows += measured(name, options.threads, options.seconds)
    text = table(rows)
    print(text)
    if options.write:
        pages.write(TABLE, text)


if __name__ == "__main__":
    main()
