"""The latency of a model, alone or compared with another."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime import Options as SessionOptions
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.protocol import Feeds
from xrlflow.backends.results import Comparison
from xrlflow.common.sizes import Shapes
from xrlflow.onnxio import ImportedModel, Source, load, name_of
from xrlflow.options import Options
from xrlflow.pipeline.artifact import Artifacts, Original, runnable
from xrlflow.pipeline.context import Clock, Context
from xrlflow.pipeline.generating import bench_loop
from xrlflow.pipeline.prepare import random_feeds
from xrlflow.pipeline.use import options_with_kernels
from xrlflow.report import bounds
from xrlflow.rewrite import Library
from xrlflow.verify import feeds_at_other_sizes
from xrlflow.verify.inputs import user_case


def bench(
    model: Source,
    against: Source | None = None,
    *,
    shapes: Shapes | None = None,
    threads: int | None = None,
    time_limit: float = 20.0,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    seed: int = 0,
    kernels: bool = False,
    generate: int | None = None,
    prompt: int | None = None,
) -> dict[str, Any]:
    """Latency of a model in milliseconds, and its speed-up over `against`.

    `speedup` is the latency of `against` divided by that of the model. Without `against` the model is measured against
    itself, which shows how noisy the machine is. In the result, `shapes` are the shapes of the inputs of the
    measurement. If `shapes` has ranges, the model is measured with sizes between, and `at_sizes` says what it takes
    with the least and the greatest. `kernels`: load the libraries of kernels in the models' folders (`NAME.so`). This
    runs their code.

    `generate`: instead, the speed of a decoder with a cache, over loops of this many steps: the cache that a step
    returns goes into the next one. A loop begins with a run of `prompt` tokens (default 128) if the model takes them
    at once and begins with an empty cache; otherwise with a cache of `prompt` drawn tokens. The result has medians
    over loops: tokens a second, and milliseconds of the prompt and of the first and the last step. `speedup` compares
    all steps of a loop, and `control` a second session of the baseline with the first. `difference`, of the outputs of
    the last step, is the RMS of their difference over their RMS (None: not finite); `outputs_differ`: it is above 0.01.

    Raises OptionError, ModelError, VerificationError or BackendError.
    """
    options = Options(search="greedy", shapes=shapes, threads=threads, seed=seed, time_limit=time_limit)
    if generate is not None or prompt is not None:
        return bench_loop(
            model, against, steps=generate, prompt=prompt, inputs=inputs, options=options, kernels=kernels
        )
    return _bench_runs(model, against, inputs, options, kernels)


def _bench_runs(
    model: Source,
    against: Source | None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
    options: Options,
    kernels: bool,
) -> dict[str, Any]:
    """What `bench` returns for single runs."""
    imported, now, time_limit = load(model, shapes=options.shapes), time.monotonic(), options.time_limit
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
        original, clock = Original(model, folder), Clock(now, now + time_limit)
        context = Context(options, original, imported, Library(()), clock, Artifacts(folder))
        feeds = dict(user_case(imported, inputs).feeds) if inputs is not None else random_feeds(context)
        baseline = runnable(against) if against is not None else original.runnable
        libraries = options_with_kernels(baseline, original.runnable, required=True) if kernels else None
        ends = [] if inputs is not None else _at_ends(imported, original.runnable, libraries, context)

        def measured_with(feeds: Feeds) -> Comparison:
            return measure(
                [baseline, original.runnable], feeds, threads=context.threads, session_options=libraries,
                time_limit=time_limit / (1 + len(ends)),
            )  # fmt: skip

        measured = measured_with(feeds)
        at_sizes = {text: _at_size(measured_with(feeds)) for text, feeds in ends}
    before, after = measured.latencies[0], measured.latencies[1]
    return {
        "model": imported.name,
        "latency_ms": after.median_ms,
        "latency_p10_ms": after.p10_ms,
        "latency_p90_ms": after.p90_ms,
        "shapes": {name: list(a.shape) for name, a in feeds.items() if isinstance(a, np.ndarray)},
        **({"at_sizes": at_sizes} if at_sizes else {}),
        "against": name_of(against) if against is not None else "itself",
        "against_ms": before.median_ms,
        "speedup": measured.speedup.median,
        **bounds("speedup", measured.speedup),
        **bounds("control", measured.control),
        "samples": measured.samples,
        "threads": measured.threads,
        "disturbed": measured.load.disturbed,
        **({"notes": context.notes} if context.notes else {}),
    }


def _at_ends(
    imported: ImportedModel, model: str | bytes, libraries: SessionOptions | None, context: Context
) -> list[tuple[str, Feeds]]:
    """Inputs with the least, and with the greatest, sizes of the user's ranges, with texts that say the sizes."""
    if not imported.ranges:
        return []
    with open_model(model, threads=context.threads, session_options=libraries) as opened:
        found, missed = feeds_at_other_sizes(imported, opened.run, context.options.seed)
    context.notes.extend(f"not measured with {text}" for text in missed)
    return [*found]


def _at_size(measured: Comparison) -> dict[str, Any]:
    return {
        "latency_ms": measured.latencies[1].median_ms,
        "against_ms": measured.latencies[0].median_ms,
        "speedup": measured.speedup.median,
        **bounds("speedup", measured.speedup),
    }
