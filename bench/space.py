"""How much the choice of algorithm and blocking is worth: `python bench/space.py --kept FILE [--threads N] [--write]`.

Layers are those of `bench/convolutions.py`, the products and convolutions of `models/operators.py`, and some that are
drawn from networks of the zoo. Of each, the kernel of an untuned compilation (without a predictor) and others are
measured alone, as cold as between other kernels: the most promising of each algorithm by the estimate, some that are
drawn, the most promising by the One-Shot Tuner's predictor, and then neighbours of the fastest. All are compared with
the expected results first. The fastest and the untuned one are then timed in turns; the best is chosen by half of these
rounds, and its ratio is that of the other half, beside the untuned kernel against itself.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import models
from bench import convolutions, pages
from models.operators import OPERATORS, operator
from xrlflow.backends.placement import last_level
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.layers import chosen_in
from xrlflow.backends.tvm.fusion.tiles import module_of, random_operands
from xrlflow.backends.tvm.kernels import products
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, KernelChoice
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.storage.exclusive import measuring
from xrlflow.tuning.blocks import Block, BlockChoice
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.layer_times import LayerLog, together
from xrlflow.tuning.layer_tuning import COLD_PRIVATE_CACHES, LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.one_shot.predictor import shipped
from xrlflow.tuning.one_shot.times import predictable, predicted
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.protocol import Measurement

Row: TypeAlias = "dict[str, Any]"
NETWORKS = (
    "resnet18", "resnet50", "resnext50", "inceptionv3", "squeezenet", "mobilenetv2", "efficientnet-b0", "nasnet-a",
    "unet", "yolo", "bert", "vit", "gpt2",
)  # fmt: skip
_DRAWN = 40
# Blockings of each algorithm: the most promising ones, and others at random; and the most promising of all by a
# predictor.
_LIKELY, _OTHERS, _PREDICTED = 6, 3, 16
# So many of the fastest have neighbours that are tried, so many of which at a time, so often.
_BEST, _NEIGHBOURS, _STEPS = 3, 12, 3
# The fastest ones are timed in so many rounds.
_LEADERS, _ROUNDS = 6, 40
# Milliseconds that rounds may take, without what flushes caches, and seconds with it.
_LIMIT, _WHOLE = 4000.0, 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, where it comes from, and the way of an untuned compilation."""

    source: str
    layer: Layer | Block
    usual: KernelChoice | BlockChoice


def layers_in(model: Any, machine: Machine) -> list[Layer | Block]:
    """The layers and blocks of a model, each once."""
    seen = LayerLog()
    fuse(import_model(model), machine, algorithms=Algorithms(timings=seen))
    return [*together(seen.layers), *together(seen.blocks)]


def case(source: str, layer: Layer | Block, machine: Machine) -> Case:
    if isinstance(layer, Block):
        return Case(source, layer, layer.untuned_choice(machine))
    alone = fuse(module_of(layer.workload, random_operands(layer.workload)), machine, channels_last=False)
    (chosen,) = chosen_in(alone)
    return Case(source, layer, layer.untuned_choice(Algorithm(chosen.algorithm), machine))


def cases(machine: Machine, seed: int) -> Iterator[Case]:
    """Those of the benchmarks, then those drawn from networks."""
    for chain in convolutions.LAYERS:
        for layer in layers_in(chain.model(1), machine):
            yield case(str(chain), layer, machine)
    for name, text in OPERATORS.items():
        for layer in layers_in(operator(text), machine):
            yield case(name, layer, machine)
    pool: dict[str, tuple[str, Layer | Block]] = {}
    for name in NETWORKS:
        for layer in layers_in(models.build(name), machine):
            pool.setdefault(layer.key, (name, layer))
    rng = random.Random(seed)
    for key in rng.sample(sorted(pool), _DRAWN):
        yield case(pool[key][0], pool[key][1], machine)


def first_choices(one: Case, space: DesignSpace, seed: int) -> list[Any]:
    """The untuned way, of each algorithm those with the least estimates and random ones, and a predictor's choices."""
    layer: Any = one.layer
    rng = np.random.default_rng([seed, int(layer.key.split()[1][:8], 16)])
    found: list[Any] = [one.usual, *layer.untuned(space.machine)]
    for kind in range(space.kinds):
        mine = np.flatnonzero(space.points[:, 0] == kind)
        likely = mine[np.argsort(space.estimates[mine], kind="stable")[:_LIKELY]]
        others = rng.choice(mine, size=min(_OTHERS, len(mine)), replace=False)
        found += [space.choices[place] for place in (*likely, *others)]
    if predictable(layer):
        places, seconds = predicted(shipped(), space, space.choices.index(one.usual))
        found += [space.choices[place] for place in places[np.argsort(seconds, kind="stable")[:_PREDICTED]]]
    return list(dict.fromkeys(found))


def explored(one: Case, measurer: LayerMeasurer, seed: int) -> tuple[dict[Any, float], int]:
    """The seconds of ways of a layer, each timed in turns with the untuned one, and how many failed. The first ones are
    followed by neighbours of the fastest, again and again."""
    space, (task,) = DesignSpace.of(one.layer, measurer.layers.machine), measurer.layers.tasks
    by_vector = dict(zip(map(tuple, space.points.tolist()), space.choices))
    rng = np.random.default_rng(seed)
    seconds: dict[Any, float] = {}
    tried: set[Any] = set()
    keys: set[str] = set()  # several ways may have the same kernel
    failed, choices = 0, first_choices(one, space, seed)
    for _ in range(1 + _STEPS):
        tried.update(choices)
        kernels: list[tuple[Any, Candidate]] = []
        for choice in choices:
            if (kernel := space.candidate(choice)) is not None and kernel.key not in keys:
                keys.add(kernel.key)
                kernels.append((choice, kernel))
        for place, outcome in measurer.outcomes(task, [kernel for _, kernel in kernels]):
            if outcome.error is None:
                seconds[kernels[place][0]] = outcome.median
            else:
                print(f"{one.layer.name}: {kernels[place][0]}: {outcome.error}", file=sys.stderr)
                failed += 1
        near: dict[Any, None] = {}
        for choice in sorted(seconds, key=seconds.__getitem__)[:_BEST]:
            vectors = space.neighbours(space.points[space.choices.index(choice)].tolist())
            near |= dict.fromkeys(by_vector[vector] for vector in vectors)
        fresh = [choice for choice in near if choice not in tried]
        choices = [fresh[i] for i in rng.permutation(len(fresh))[:_NEIGHBOURS]]
    return seconds, failed


def kind_of(layer: Layer | Block) -> str:
    if isinstance(layer, Block):
        return "block"
    return "product" if isinstance(layer.workload, products.Product) else "convolution"


def measured(one: Case, machine: Machine, pool: Pool, seed: int) -> Row:
    """The row of a layer."""
    layer: Any = one.layer
    timing = replace(pool.options.timing, others=last_level() if layer.far else 0)
    tasks = LayerTasks([layer], machine, lambda _: one.usual)
    with ExitStack() as stack:
        seconds, failed = explored(one, LayerMeasurer(tasks, pool.options, stack, pool), seed)
    leaders = [choice for choice in sorted(seconds, key=seconds.__getitem__) if choice != one.usual][
        :_LEADERS
    ]
    order = [one.usual, *leaders, one.usual]
    with pool.built(machine.target(), [layer.kernel(choice, machine) for choice in order]) as built:
        several = [kernel for kernel in built if isinstance(kernel, Kernel)]
        if len(several) < len(order):
            raise BackendError(f"{layer.name}: a kernel that ran before cannot be built")
        rounds = pool.in_turns(several, replace(timing, samples=_ROUNDS, limit_ms=_LIMIT))
    if isinstance(rounds, Measurement):
        raise BackendError(f"{layer.name}: {rounds.error}")
    *columns, again = map(list, zip(*rounds))
    return {
        "layer": layer.name, "source": one.source, "far": layer.far, "usual": str(one.usual),
        "turns": dict(zip(map(str, order), columns)), "again": again, "failed": failed, "running": len(seconds),
        "kind": kind_of(layer),
        "once": {str(choice): value for choice, value in seconds.items()}, "cpu": machine.cpu,
    }  # fmt: skip


def verdict(row: Row) -> tuple[str, float, float, float]:
    """The best way by the even rounds; by the odd ones its microseconds, the untuned kernel's time over its, and that
    of the untuned kernel against itself."""
    turns: dict[str, list[float]] = row["turns"]
    best = min(turns, key=lambda choice: statistics.median(turns[choice][::2]))
    usual, odd = turns[row["usual"]][1::2], turns[best][1::2]
    ratio = statistics.median(a / b for a, b in zip(usual, odd))
    return (
        best,
        1e6 * statistics.median(odd),
        ratio,
        statistics.median(a / b for a, b in zip(usual, row["again"][1::2])),
    )


def table(rows: Sequence[Row]) -> str:
    lines = ["| layer | from | untuned | best | us | untuned / best | A/A |", "|" + "---|" * 7]
    ratios: dict[str, list[float]] = {"convolution": [], "block": [], "product": []}
    controls = []
    for row in rows:
        best, us, ratio, control = verdict(row)
        ratios[row["kind"]].append(ratio)
        controls.append(control)
        far = ", weights from memory" if row["far"] else ""
        lines.append(
            f"| {row['layer']}{far} | {row['source']} | {row['usual']} | "
            f"{'the same' if best == row['usual'] else best} | {us:.0f} | {ratio:.3f} | {control:.3f} |"
        )
    groups = {f"{kind}s": some for kind, some in ratios.items()}
    groups["convolutions and blocks"] = ratios["convolution"] + ratios["block"]
    for name, some in groups.items():
        if some:
            mean = math.exp(statistics.fmean(map(math.log, some)))
            lines.append(f"| geometric mean, {len(some)} {name} | | | | | {mean:.3f} | |")
    mean = math.exp(statistics.fmean(map(math.log, controls)))
    return "\n".join([*lines, f"| geometric mean, all | | | | | | {mean:.3f} |"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the layers and blockings that are drawn")
    parser.add_argument("--kept", type=Path, required=True, help="rows are kept in this file, and resumed")
    parser.add_argument("--most", type=int, help="measure at most so many layers now")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    machine = detect(cores=options.threads)
    rows = (
        [json.loads(line) for line in options.kept.read_text().splitlines()] if options.kept.exists() else []
    )
    if any("kind" not in row for row in rows):
        raise SystemExit(f"{options.kept} has rows of an earlier version: name another file")
    known = {(row["source"], row["layer"], row["far"]) for row in rows}
    with ExitStack() as stack:
        stack.enter_context(measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)))
        pool = stack.enter_context(
            Pool(PoolOptions(threads=options.threads, timing=COLD_PRIVATE_CACHES, run_seconds=_WHOLE))
        )
        left = options.most if options.most is not None else math.inf
        for one in cases(machine, options.seed):
            if left <= 0:
                break
            if (one.source, one.layer.name, one.layer.far) in known:
                continue
            begin, left = time.monotonic(), left - 1
            rows.append(measured(one, machine, pool, options.seed))
            with options.kept.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            best, us, ratio, control = verdict(rows[-1])
            print(
                f"{one.layer.name} ({one.source}): {one.usual} -> {best}, {us:.0f} us, {ratio:.3f}, A/A {control:.3f}, "
                f"{time.monotonic() - begin:.0f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    print(table(rows))
    if options.write:
        print(pages.write(f"space-{options.threads}", table(rows)), file=sys.stderr)


if __name__ == "__main__":
    main()
