"""The One-Shot Tuner's measurements and its predictor: `python bench/one_shot.py gather FILE [--minutes N]`, `... train
FILE -o PREDICTOR`, `... compare FILE`.

`gather` draws layers and measures kernels of each, beside nothing else. Layers are drawn by the prior of the networks
of the zoo (`--layers prior`: each field of a layer conditioned on two that were drawn before it; Ryu et al., 2022,
section 3.2) or uniformly. Their kernels are those that a search visits (`--kernels explored`: a genetic algorithm on
what it has measured; section 3.3) or random ones. Rows (JSON lines, in gzip) are kept at once; another call goes on
with other layers. `--layers held-out` measures the layers of networks that are held out, with which `train` tests the
predictor; drawn layers are none of these. `compare` trains with some of the measurements, or with other losses.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import models
from bench import pages
from bench.space import NETWORKS, layers_in
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.kernels import direct, products
from xrlflow.backends.tvm.kernels.layer_kernels import KernelChoice, LayerWorkload
from xrlflow.backends.tvm.kernels.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.storage.exclusive import measuring
from xrlflow.tuning.layer_tuning import COLD_PRIVATE_CACHES, LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.times import LARGEST, WORTH, largest
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.one_shot.training import Measured, TrainingConfig, train
from xrlflow.tuning.pool import Pool, PoolOptions
from xrlflow.tuning.session import tune
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.store import Store
from xrlflow.tuning.tuners.protocol import Method

Row: TypeAlias = "dict[str, Any]"
HELD_OUT = ("resnet18", "squeezenet", "efficientnet-b0", "vit")
# Multiplications of a layer, at most.
_WORK = 6e8
_STEPS: Mapping[str, tuple[Step, ...]] = {
    "none": (),
    "bias": (Step("relax.add", (Earlier(0), Extra(True))),),
    "bias, relu": (Step("relax.add", (Earlier(0), Extra(True))), Step("relax.nn.relu", (Earlier(1),))),
    "bias, residual, relu": (
        Step("relax.add", (Earlier(0), Extra(True))),
        Step("relax.add", (Earlier(1), Extra(False))),
        Step("relax.nn.relu", (Earlier(2),)),
    ),
}
Fields: TypeAlias = "dict[str, Any]"
"""A layer as independent fields: a product has no window."""


def fields_of(layer: Layer) -> Fields | None:
    """The fields of a layer with as many rows as columns; None for others."""
    workload, kind = layer.workload, min(len(layer.workload.steps), len(_STEPS) - 1)
    common = {"far": layer.far, "steps": list(_STEPS)[kind]}
    if isinstance(workload, products.Product):
        return common | {
            "window": None, "stride": 1, "side": workload.rows, "channels": workload.terms, "columns": workload.columns,
            "groups": "one",
        }  # fmt: skip
    if len(workload.image) != 4 or workload.image[0] != 1 or max(workload.dilations) > 1:
        return None
    groups = "one" if workload.groups == 1 else "each" if workload.channels == 1 else str(workload.channels)
    return common | {
        "window": list(workload.window[1:]), "stride": workload.strides[2], "side": workload.out[2],
        "channels": workload.image[3], "columns": workload.out[3], "groups": groups,
    }  # fmt: skip


def layer_of(fields: Fields) -> Layer | None:
    """The layer of fields; None if they do not fit together, or if it is too large."""
    channels, columns, side = fields["channels"], fields["columns"], fields["side"]
    steps = _STEPS[fields["steps"]]
    workload: LayerWorkload
    if fields["window"] is None:
        workload = products.Product((1, side, channels), (1, side, columns), steps)
    else:
        (down, across), stride = fields["window"], fields["stride"]
        groups = {"one": 1, "each": channels}.get(fields["groups"])
        groups = groups if groups is not None else channels // int(fields["groups"])
        if groups < 1 or channels % groups or columns % groups:
            return None
        rows = side * stride
        begin = (0, (down - 1) // 2, (across - 1) // 2)
        workload = direct.Convolution(
            (1, rows, rows, channels), (1, side, side, columns), (1, down, across), (1, stride, stride),
            (1, 1, 1), begin, groups, steps,
        )  # fmt: skip
    layer = Layer(workload, fields["far"])
    return layer if layer.work <= _WORK and largest(workload) <= LARGEST else None


def drawn(known: Sequence[Fields], prior: bool, rng: random.Random) -> Layer:
    """A layer of drawn fields. `prior`: each field is that of a known layer which has two of the fields drawn before,
    as far as there is one."""
    while True:
        fields: Fields = {}
        names = list(known[0])
        rng.shuffle(names)
        for name in names:
            pool = list(known)
            for earlier in rng.sample(sorted(fields), min(2, len(fields))) if prior else ():
                fitting = [each for each in pool if each[earlier] == fields[earlier]]
                pool = fitting or pool
            values = [each[name] for each in pool]
            if not prior:
                values = list({json.dumps(value): value for value in values}.values())
            fields[name] = rng.choice(values)
        if (layer := layer_of(fields)) is not None:
            return layer


def known_fields(names: Iterable[str], machine: Machine) -> list[Fields]:
    layers = [layer for name in names for layer in layers_in(models.build(name), machine)]
    found = [fields for layer in layers if isinstance(layer, Layer) and (fields := fields_of(layer))]
    return list({json.dumps(fields): fields for fields in found}.values())


def stored(workload: LayerWorkload) -> Row:
    """A form as JSON."""
    return {
        "kind": "product" if isinstance(workload, products.Product) else "convolution",
        **asdict(workload),
    }


def workload_of(row: Row) -> LayerWorkload:
    given = dict(row)
    steps = tuple(
        Step(step["operator"], tuple(_operand(o) for o in step["operands"])) for step in given.pop("steps")
    )
    kind = given.pop("kind")
    sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return (products.Product if kind == "product" else direct.Convolution)(**sizes, steps=steps)


def _operand(given: Any) -> float | Extra | Earlier:
    if not isinstance(given, dict):
        return float(given)
    return Earlier(given["step"]) if "step" in given else Extra(given["by_channel"])


def kernels(
    layer: Layer, machine: Machine, pool: Pool, explored: bool, count: int, seed: int
) -> tuple[list[tuple[Any, float]], float]:
    """Measure so many kernels of a layer: the ways of those that ran, with their seconds, and those of the untuned
    kernel with which each was timed in turns (it is among them, too: that is the control). Raises BackendError."""
    method = Method.GENETIC if explored else Method.RANDOM
    with contextlib.ExitStack() as at_end:
        folder = at_end.enter_context(tempfile.TemporaryDirectory())
        store = at_end.enter_context(Store(Path(folder) / "tuning.sqlite"))
        tasks = LayerTasks([layer], machine, lambda known: known.untuned(machine)[0])
        measurer = LayerMeasurer(tasks, pool.options, at_end, pool)
        tune(tasks.tasks, tasks.maker(method), trials=count, batch=16, seed=seed, store=store, pool=measurer)
        found = [
            (json.loads(record.trace), record.outcome.median)
            for record in store.records(layer.key)
            if record.outcome.error is None
        ]
        if (untuned := measurer.untuned_seconds(layer.key)) is None:
            raise BackendError(f"{layer.name}: its untuned kernel cannot be measured")
        return found, untuned


def layers_to_measure(options: argparse.Namespace, machine: Machine) -> Iterator[Layer]:
    """Layers of the held-out networks, one after the other, or drawn ones without end."""
    held_out = [
        layer
        for name in HELD_OUT
        for layer in layers_in(models.build(name), machine)
        if isinstance(layer, Layer)
    ]
    if options.layers == "held-out":
        yield from held_out
        return
    others = {replace(layer.workload, steps=()) for layer in held_out}
    known = known_fields([name for name in NETWORKS if name not in HELD_OUT], machine)
    rng = random.Random(f"{options.seed} {options.layers}")
    while True:
        layer = drawn(known, options.layers == "prior", rng)
        if replace(layer.workload, steps=()) not in others:
            yield layer


def gather(options: argparse.Namespace) -> None:
    machine, end = detect(cores=options.threads), time.monotonic() + 60 * options.minutes
    rows = read(options.file)
    known = {_place(row) for row in rows}
    with contextlib.ExitStack() as at_end:
        at_end.enter_context(measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)))
        pool = at_end.enter_context(Pool(PoolOptions(threads=options.threads, timing=COLD_PRIVATE_CACHES)))
        for number, layer in enumerate(layers_to_measure(options, machine)):
            if time.monotonic() > end:
                return
            row = {"form": stored(layer.workload), "far": layer.far, "machine": asdict(machine)}
            if _place(row) in known:
                continue
            begin = time.monotonic()
            try:
                found, untuned = kernels(
                    layer, machine, pool, options.kernels == "explored", options.count, number
                )
            except BackendError as error:
                print(error, file=sys.stderr)
                continue
            row |= {"layers": options.layers, "kernels": options.kernels, "paired": True}
            row |= {"untuned": untuned, "found": found}
            with gzip.open(options.file, "at") as file:
                file.write(json.dumps(row) + "\n")
            best = min((seconds for _, seconds in found), default=math.inf)
            print(
                f"{layer.name}: {len(found)} kernels, the best {1e6 * best:.0f} us, "
                f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True,
            )  # fmt: skip


def _place(row: Row) -> str:
    """What is measured once: a layer on a machine."""
    return json.dumps([row["form"], row["far"], row["machine"]])


def read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The kernels of a layer that were measured. `usual`: which of them an untuned compilation has without a predictor;
    None: it was not measured."""

    measured: Measured
    usual: int | None


def known_of(row: Row) -> Known | None:
    """The measurements of a row; None if fewer than two are of ways that there are today."""
    layer, machine = Layer(workload_of(row["form"]), row["far"]), Machine(**row["machine"])
    space = DesignSpace.of(layer, machine)
    places = {choice: i for i, choice in enumerate(space.choices)}
    choices = [(KernelChoice.stored(json.dumps(text)), seconds) for text, seconds in row["found"]]
    kept = [(places[choice], seconds) for choice, seconds in choices if choice in places]
    if len(kept) < 2:
        return None
    at = np.array([place for place, _ in kept], np.int64)
    seconds = np.array([seconds for _, seconds in kept])
    (usual,) = np.nonzero(at == places[layer.estimated(machine)])
    return Known(Measured(tokens_of(space, at), seconds), int(usual[0]) if len(usual) else None)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a predictor makes of layers: the median rank correlation of predicted and measured times, and geometric
    means of the speed of its choice over that of the best, of its choice over the untuned kernel's, and of the best
    over the untuned kernel's."""

    layers: int
    rank: float
    best: float
    gain: float
    most: float

    def __str__(self) -> str:
        return (
            f"{self.layers} layers: rank correlation {self.rank:.3f}, its choice {self.best:.3f} of the best and "
            f"{self.gain:.3f} of the untuned kernel, whose best is {self.most:.3f}"
        )


def quality(predictor: Predictor, layers: Sequence[Known]) -> Quality:
    ranks, parts, gains, most = [], [], [], []
    for known in layers:
        seconds = known.measured.seconds
        predicted = predictor.seconds(known.measured.tokens)
        one, other = (np.argsort(np.argsort(values)) for values in (predicted, seconds))
        ranks.append(float(np.corrcoef(one, other)[0, 1]))
        if known.usual is not None:
            predicted[known.usual] *= WORTH
            gains.append(seconds[known.usual] / seconds[predicted.argmin()])
            most.append(seconds[known.usual] / seconds.min())
        parts.append(seconds.min() / seconds[predicted.argmin()])
    mean = statistics.geometric_mean
    return Quality(len(layers), statistics.median(ranks), mean(parts), mean(gains), mean(most))


def trained(rows: Sequence[Row], layers: Sequence[Known], config: TrainingConfig, seed: int) -> Predictor:
    """A predictor that learned from layers, which are those of `rows`."""
    about = {
        "processors": sorted({row["machine"]["cpu"] for row in rows}), "layers": len(layers),
        "measurements": sum(len(known.measured.seconds) for known in layers),
    }  # fmt: skip

    def listener(step: int, loss: float) -> None:
        print(f"{step}: {loss:.4f}", file=sys.stderr)

    return train([known.measured for known in layers], config, seed, about, listener)


def all_known(rows: Sequence[Row]) -> tuple[list[Row], list[Known]]:
    pairs = [(row, known) for row in rows if (known := known_of(row)) is not None]
    return [row for row, _ in pairs], [known for _, known in pairs]


def learn(options: argparse.Namespace) -> None:
    rows = [row for row in read(options.file) if options.processor in (None, row["machine"]["cpu"])]
    taught, layers = all_known([row for row in rows if row["layers"] != "held-out"])
    found = trained(taught, layers, TrainingConfig(steps=options.steps), options.seed)
    found = replace(found, about={**found.about, "better_on": options.better_on})
    found.save(options.output)
    print(f"{options.output}: {found.about}")
    print(f"taught: {quality(found, layers)}")
    for setting, some in by_setting(
        [row for row in read(options.file) if row["layers"] == "held-out"]
    ).items():
        print(f"held out, {setting}: {quality(found, all_known(some)[1])}")


def by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        cores = row["machine"]["cores"]
        name = f"{row['machine']['cpu']}, {cores} thread{'s' if cores > 1 else ''}"
        found.setdefault(name, []).append(row)
    return found


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to make a predictor: which measurements it learns from, and the loss."""

    layers: str = "prior"
    kernels: str = "explored"
    ranking: float = 1.0
    squared: bool = True


VARIANTS = {
    "prior-guided layers, explored kernels, both losses": Variant(),
    "uniform layers": Variant(layers="uniform"),
    "random kernels": Variant(kernels="random"),
    "squared error alone": Variant(ranking=0.0),
    "ranking loss alone": Variant(squared=False),
}


def limited(rows: Sequence[Row], most: int) -> list[Row]:
    """The first rows, with at most so many measurements in all."""
    found, left = [], most
    for row in rows:
        if left >= len(row["found"]):
            found.append(row)
            left -= len(row["found"])
    return found


def compare(options: argparse.Namespace) -> None:
    """The table of variants, each with as many measurements of one machine and thread, on the held-out layers. All
    kernels were timed in turns with the untuned one."""
    rows = [
        row for row in read(options.file)
        if row["machine"]["cores"] == 1 and row["machine"]["cpu"] == options.processor and row.get("paired")
    ]  # fmt: skip
    _, held_out = all_known([row for row in rows if row["layers"] == "held-out"])
    sources = {
        variant: [r for r in rows if (r["layers"], r["kernels"]) == (variant.layers, variant.kernels)]
        for variant in VARIANTS.values()
    }
    most = min(sum(len(row["found"]) for row in some) for some in sources.values())
    lines = [
        f"{most} measurements each, {len(held_out)} held-out layers, {options.seeds} seeds.", "",
        "| variant | rank correlation | its choice over the best | its choice over the untuned kernel |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name, variant in VARIANTS.items():
        some, layers = all_known(limited(sources[variant], most))
        config = TrainingConfig(steps=options.steps, ranking=variant.ranking, squared=variant.squared)
        found = [quality(trained(some, layers, config, seed), held_out) for seed in range(options.seeds)]
        columns = ([q.rank for q in found], [q.best for q in found], [q.gain for q in found])
        cells = [f"{statistics.median(c):.3f} [{min(c):.3f}, {max(c):.3f}]" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.write:
        pages.write("one-shot-variants", "\n".join(lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("gather")
    one.add_argument("--layers", choices=["prior", "uniform", "held-out"], default="prior")
    one.add_argument("--kernels", choices=["explored", "random"], default="explored")
    one.add_argument("--count", type=int, default=32, help="kernels of a layer (32)")
    one.add_argument("--minutes", type=float, default=60.0)
    one.add_argument("--threads", type=int, default=1)
    one.add_argument("--seed", type=int, default=0)
    other = commands.add_parser("train")
    other.add_argument("-o", "--output", type=Path, required=True)
    other.add_argument("--seed", type=int, default=0)
    other.add_argument(
        "--better-on",
        nargs="*",
        default=[],
        metavar="PROCESSOR:THREADS",
        help="where it was shown to choose better than estimates, such as znver3:1",
    )
    third = commands.add_parser("compare")
    third.add_argument("--seeds", type=int, default=5)
    third.add_argument("--write", action="store_true", help="put the table into docs/benchmarks")
    for command in (other, third):
        command.add_argument("--steps", type=int, default=4000)
        command.add_argument(
            "--processor", required=command is third, help="LLVM's name: only what was measured on it"
        )
    for command in (one, other, third):
        command.add_argument("file", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    {"gather": gather, "train": learn, "compare": compare}[options.command](options)


if __name__ == "__main__":
    main()
