"""The speed of a decoder over many steps, alone or compared with another."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.generate import Generation, Script, Timing, measure_loops, rate
from xrlflow.backends.protocol import Array
from xrlflow.common.sizes import has_range
from xrlflow.onnxio import ModelError, Source, load, name_of
from xrlflow.options import OptionError, Options
from xrlflow.pipeline.artifact import runnable
from xrlflow.pipeline.use import options_with_kernels
from xrlflow.report import bounds
from xrlflow.verify.decoders import Decoder
from xrlflow.verify.signature import signature

APART = 1e-2
"""Outputs differ if their difference is more than this, as a part of their size (both as RMS)."""
_PROMPT = 128
"""Tokens of a prompt, if the user states none."""


_MOST_BYTES = 1 << 30


def bench_loop(
    model: Source,
    against: Source | None = None,
    *,
    steps: int | None,
    prompt: int | None,
    inputs: Any,
    options: Options,
    kernels: bool,
) -> dict[str, Any]:
    """What `bench` returns for `generate`: see there. Raises OptionError, ModelError or BackendError."""
    if steps is None:
        raise OptionError("prompt: has no meaning without generate: give --generate N")
    if inputs is not None:
        raise OptionError("inputs: have no meaning with generate, which draws the tokens of each step")
    if any(map(has_range, (options.shapes or {}).values())):
        raise OptionError("a range of sizes (16..512) has no meaning with generate: give numbers")
    if isinstance(steps, bool) or not hasattr(steps, "__index__"):
        raise OptionError(f"generate {steps!r} is no whole number")
    steps = operator.index(steps)
    if steps < 1:
        raise OptionError(f"generate {steps} is no number of steps: give 1 or more")
    if prompt is not None and prompt < 0:
        raise OptionError(f"prompt {prompt} is negative: give 0 or more tokens")
    decoder = Decoder.of(load(model, shapes=options.shapes))
    after = runnable(model)
    before = runnable(against) if against is not None else after
    if against is not None:
        _check_alike(decoder, name_of(against), before)
    libraries = options_with_kernels(before, after, required=True) if kernels else None
    generation = measure_loops(
        [after, after] if against is None else [before, after, before],
        _scripts(decoder, steps, _prompt(decoder, steps, prompt), options.seed), threads=options.threads,
        time_limit=options.time_limit, session_options=libraries,
    )  # fmt: skip
    return _report(decoder, generation, None if against is None else name_of(against))


def _check_alike(decoder: Decoder, name: str, other: str | bytes) -> None:
    """Raise ModelError unless the other model takes and returns what this one does."""
    ports = signature(other)
    ours = {port.name for port in decoder.plan.ports}
    if missing := ours ^ {port.name for port in ports.required}:
        raise ModelError(
            f"{name}: input {min(missing)!r} is in one of the models only: both get the same inputs"
        )
    returned = {cache.output for cache in decoder.caches} | {decoder.result}
    if missing := returned - {port.name for port in ports.outputs}:
        raise ModelError(f"{name}: has no output {min(missing)!r}, which {decoder.name} has")


def _prompt(decoder: Decoder, steps: int, asked: int | None) -> int:
    """The tokens before the first step: those asked for, or the length of the cache in the user's shapes, or the usual
    number, if it fits. Raises OptionError if they do not fit beside the steps."""
    stated = max((decoder.plan.bound.get(str(name), 0) for name in decoder.growing), default=0)
    needed = decoder.growing or isinstance(decoder.sequence, str)
    wanted = asked if asked is not None else stated or (_PROMPT if needed else 0)
    room = decoder.room()
    if room is None:
        return wanted
    left = room[0] - steps * decoder.step
    if left < (asked or 0):
        raise OptionError(
            f"{decoder.name}: input {room[1]!r} has room for {room[0]} tokens, fewer than a prompt of {asked or 0} and "
            f"{steps} steps: give a smaller --prompt or --generate"
        )
    return min(wanted, left)


def _scripts(decoder: Decoder, steps: int, prompt: int, seed: int) -> list[Script]:
    """The script with a prefill, if the model may take one, and the one that begins with a cache of the prompt. Raises
    OptionError if the inputs of all steps take too much memory: those with masks grow with the square of their number.
    """
    last = decoder.tokens(prompt + (steps - 1) * decoder.step, decoder.step, seed)
    if steps * sum(array.nbytes for array in last.values()) > _MOST_BYTES:
        raise OptionError(
            f"the inputs of {steps} steps take over {_MOST_BYTES >> 30} GB: give a smaller --generate"
        )
    lengths = [prompt + i * decoder.step for i in range(steps + 1)]
    taken = tuple(decoder.tokens(past, decoder.step, seed + 1 + i) for i, past in enumerate(lengths[:-1]))
    scripts = [
        Script(decoder.caches, decoder.start(prompt, seed), None, taken, decoder.result, tuple(lengths))
    ]
    if isinstance(decoder.sequence, str) and prompt:
        first = decoder.tokens(0, prompt, seed)
        empty = decoder.start(0, seed)
        scripts.insert(0, Script(decoder.caches, empty, first, taken, decoder.result, (0, *lengths)))
    return scripts


def _report(decoder: Decoder, generation: Generation, against: str | None) -> dict[str, Any]:
    script, load = generation.script, generation.load
    tokens, batch = decoder.step * len(script.steps), decoder.batch(script.start)
    compared = against is not None
    measured = {
        "model": decoder.name,
        "generate": len(script.steps),
        "prompt": script.lengths[-1] - tokens,
        "batch": batch,
        "caches": {cache.input: cache.output for cache in script.caches},
        **_figures("", generation.timings[1 if compared else 0], batch * tokens),
        "against": against if against is not None else "itself",
    }
    if compared:
        difference = _apart(*generation.results[:2])
        measured |= {
            **_figures("against_", generation.timings[0], batch * tokens),
            "speedup": generation.speedups[0].median,
            **bounds("speedup", generation.speedups[0]),
            "output": script.result,
            "difference": difference,
            "outputs_differ": difference is None or difference > APART,
        }
    control = generation.speedups[-1]
    return measured | {
        "control": control.median,
        **bounds("control", control),
        "samples": len(generation.timings[0]),
        "threads": generation.threads,
        "disturbed": load.disturbed,
    }


def _figures(prefix: str, timings: Sequence[Timing], tokens: int) -> dict[str, float | None]:
    """Medians over all loops of one model."""

    def median(seconds: list[float]) -> float:
        return 1e3 * statistics.median(seconds)

    prefills = [timing.prefill for timing in timings if timing.prefill is not None]
    speed = rate(timings, tokens)
    return {
        f"{prefix}prefill_ms": median(prefills) if prefills else None,
        f"{prefix}tokens_per_second": speed.median,
        **bounds(f"{prefix}tokens_per_second", speed),
        f"{prefix}first_step_ms": median([timing.first for timing in timings]),
        f"{prefix}last_step_ms": median([timing.last for timing in timings]),
    }


def _apart(before: Array, after: Array) -> float | None:
    """The RMS of the difference as a part of the RMS of `before`; None if shapes differ or it is not finite."""
    if before.shape != after.shape:
        return None
    if np.array_equal(before, after, equal_nan=True):
        return 0.0
    a, b = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(a)  # tokens that are ruled out have minus infinity
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return None
    a, b = a[finite], b[finite]
    if not a.size:
        return 0.0
    size = float(np.sqrt(np.mean(a**2)))
    apart = float(np.sqrt(np.mean((a - b) ** 2)))
    return apart / size if np.isfinite(apart) and size > 0.0 and np.isfinite(size) else None
