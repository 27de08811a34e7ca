"""The One-Shot Tuner's measurements and its predictor: `python bench/one_shot.py gather FILE [--minutes N]`, `... train
FILE -o PREDICTOR`.

`gather` draws layers and measures kernels of each, beside nothing else. Layers are drawn by the prior of the networks
of the zoo (`--layers prior`: each field of a layer conditioned on two that were drawn before it; Ryu et al., 2022,
section 3.2) or uniformly. Their kernels are those that a search visits (`--kernels explored`: a genetic algorithm on
what it has measured; section 3.3) or random ones. Rows (JSON lines) are kept at once; another call goes on with other
layers. `--layers held-out` measures the layers of networks that are held out, with which `train` tests the predictor;
drawn layers are none of these.

`--core N` binds a call to one CPU, where it compiles and measures. It does not wait for others that measure: one call
for each CPU takes less time in all than a call that measures alone, at the price of some noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import models
from bench.space import NETWORKS, layers_in
from xrlflow.backends.limits import default_threads
from xrlflow.backends.tvm import detect, direct, products
from xrlflow.backends.tvm.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.ways import Form, Way
from xrlflow.exclusive import measuring
from xrlflow.lowering import COLD_PRIVATE_CACHES
from xrlflow.tuning.layer_tuning import LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.one_shot.training import Measured, TrainingConfig, train
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import tune
from xrlflow.tuning.space import WaySpace
from xrlflow.tuning.store import Store
from xrlflow.tuning.tuners.protocol import Method

Row: TypeAlias = "dict[str, Any]"
HELD_OUT = ("resnet18", "squeezenet", "efficientnet-b0", "vit")
# Multiplications of a layer, and floats of an operand, at most.
_WORK, _FLOATS = 6e8, 2e7
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
    form, kind = layer.form, min(len(layer.form.steps), len(_STEPS) - 1)
    common = {"far": layer.far, "steps": list(_STEPS)[kind]}
    if isinstance(form, products.Form):
        return common | {
            "window": None, "stride": 1, "side": form.rows, "channels": form.terms, "columns": form.columns,
            "groups": "one",
        }  # fmt: skip
    if len(form.image) != 4 or form.image[0] != 1 or max(form.dilations) > 1:
        return None
    groups = "one" if form.groups == 1 else "each" if form.channels == 1 else str(form.channels)
    return common | {
        "window": list(form.window[1:]), "stride": form.strides[2], "side": form.out[2],
        "channels": form.image[3], "columns": form.out[3], "groups": groups,
    }  # fmt: skip


def layer_of(fields: Fields) -> Layer | None:
    """The layer of fields; None if they do not fit together, or if it is too large."""
    channels, columns, side = fields["channels"], fields["columns"], fields["side"]
    steps = _STEPS[fields["steps"]]
    form: Form
    if fields["window"] is None:
        form = products.Form((1, side, channels), (1, side, columns), steps)
    else:
        (down, across), stride = fields["window"], fields["stride"]
        groups = {"one": 1, "each": channels}.get(fields["groups"])
        groups = groups if groups is not None else channels // int(fields["groups"])
        if groups < 1 or channels % groups or columns % groups:
            return None
        rows = side * stride
        begin = (0, (down - 1) // 2, (across - 1) // 2)
        form = direct.Form(
            (1, rows, rows, channels), (1, side, side, columns), (1, down, across), (1, stride, stride),
            (1, 1, 1), begin, groups, steps,
        )  # fmt: skip
    layer = Layer(form, fields["far"])
    floats = max(math.prod(form.image), math.prod(form.out), form.terms * form.out[-1])
    return layer if layer.work <= _WORK and floats <= _FLOATS else None


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


def stored(form: Form) -> Row:
    """A form as JSON."""
    return {"kind": "product" if isinstance(form, products.Form) else "convolution", **asdict(form)}


def form_of(row: Row) -> Form:
    given = dict(row)
    steps = tuple(
        Step(step["operator"], tuple(_operand(o) for o in step["operands"])) for step in given.pop("steps")
    )
    kind = given.pop("kind")
    sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return (products.Form if kind == "product" else direct.Form)(**sizes, steps=steps)


def _operand(given: Any) -> float | Extra | Earlier:
    if not isinstance(given, dict):
        return float(given)
    return Earlier(given["step"]) if "step" in given else Extra(given["by_channel"])


def kernels(
    layer: Layer, measurer: LayerMeasurer, explored: bool, count: int, seed: int
) -> Iterator[tuple[Any, float]]:
    """Measure so many kernels of a layer: the ways of those that ran, and their seconds."""
    machine = measurer.layers.machine
    tasks = measurer.layers = LayerTasks([layer], machine, lambda known: known.untuned(machine)[0])
    method = Method.GENETIC if explored else Method.RANDOM
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "tuning.sqlite") as store:
        tune(tasks.tasks, tasks.maker(method), trials=count, batch=8, seed=seed, store=store, pool=measurer)
        for record in store.known(layer.key):
            if record.outcome.error is None:
                yield json.loads(record.trace), record.outcome.median


def layers_to_measure(options: argparse.Namespace, machine: Machine) -> Iterator[Layer]:
    """Layers of the held-out networks, one after the other, or drawn ones without end."""
    held_out = [
        layer for name in HELD_OUT for layer in layers_in(models.build(name), machine) if isinstance(layer, Layer)
    ]
    if options.layers == "held-out":
        yield from held_out
        return
    others = {replace(layer.form, steps=()) for layer in held_out}
    known = known_fields([name for name in NETWORKS if name not in HELD_OUT], machine)
    rng = random.Random(f"{options.seed} {options.layers}")
    while True:
        layer = drawn(known, options.layers == "prior", rng)
        if replace(layer.form, steps=()) not in others:
            yield layer


def gather(options: argparse.Namespace) -> None:
    machine, end = detect(cores=options.threads), time.monotonic() + 60 * options.minutes
    rows = read(options.file)
    known = {json.dumps([row["form"], row["far"], row["threads"]]) for row in rows}
    with contextlib.ExitStack() as at_end:
        if options.core is None:
            at_end.enter_context(measuring(lambda holder: print(f"waiting: {holder}", file=sys.stderr)))
        else:
            os.sched_setaffinity(0, {options.core})
        builders = default_threads() if options.core is None else 1
        pool = PoolOptions(builders, options.threads, COLD_PRIVATE_CACHES)
        measurer = LayerMeasurer(LayerTasks([], machine, lambda layer: None), pool, at_end)
        for number, layer in enumerate(layers_to_measure(options, machine)):
            if time.monotonic() > end:
                return
            about = {"form": stored(layer.form), "far": layer.far, "threads": options.threads}
            if json.dumps([about["form"], about["far"], about["threads"]]) in known:
                continue
            begin = time.monotonic()
            found = list(kernels(layer, measurer, options.kernels == "explored", options.count, number))
            row = about | {
                "cpu": machine.cpu,
                "layers": options.layers,
                "kernels": options.kernels,
                "found": found,
            }
            with options.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            best = min((seconds for _, seconds in found), default=math.inf)
            print(
                f"{layer.name}: {len(found)} kernels, the best {1e6 * best:.0f} us, "
                f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True,
            )  # fmt: skip


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def as_measured(row: Row) -> Measured | None:
    """The measurements of a row; None if none is of a way that there is today."""
    machine = detect(cores=row["threads"])
    space = WaySpace.of(Layer(form_of(row["form"]), row["far"]), machine)
    places = {way: i for i, way in enumerate(space.ways)}
    ways = [(Way.stored(json.dumps(text)), seconds) for text, seconds in row["found"]]
    kept = [(places[way], seconds) for way, seconds in ways if way in places]
    if len(kept) < 2:
        return None
    at = np.array([place for place, _ in kept], np.int64)
    seconds = np.array([seconds for _, seconds in kept])
    return Measured(tokens_of(space, row["threads"], at), seconds, space.flops)


def split(rows: Sequence[Row]) -> tuple[list[Measured], list[Measured]]:
    """What is learned from, and what is held out."""
    both: tuple[list[Measured], list[Measured]] = ([], [])
    for row in rows:
        if (found := as_measured(row)) is not None:
            both[row["layers"] == "held-out"].append(found)
    return both


def quality(predictor: Predictor, layers: Sequence[Measured]) -> tuple[float, float]:
    """Medians over layers: the rank correlation of scores and throughputs, and the throughput of the best by the
    scores over the best of all."""
    ranks, parts = [], []
    for layer in layers:
        scores = predictor.scores(layer.tokens)
        one, other = (np.argsort(np.argsort(values)) for values in (scores, layer.throughput))
        ranks.append(float(np.corrcoef(one, other)[0, 1]))
        parts.append(float(layer.seconds.min() / layer.seconds[scores.argmax()]))
    return statistics.median(ranks), statistics.median(parts)


def learn(options: argparse.Namespace) -> None:
    rows = read(options.file)
    taught, held_out = split(rows)
    about = {
        "cpu": rows[0]["cpu"], "layers": len(taught), "measurements": sum(len(layer.seconds) for layer in taught)
    }  # fmt: skip
    config = TrainingConfig(steps=options.steps, ranking=options.ranking, squared=not options.only_ranking)
    found = train(
        taught, config, options.seed, about, lambda step, loss: print(f"{step}: {loss:.4f}", file=sys.stderr)
    )
    found.save(options.output)
    print(f"{options.output}: {about}")
    for name, layers in (("taught", taught), ("held out", held_out)):
        if layers:
            rank, part = quality(found, layers)
            print(
                f"{name}, {len(layers)} layers: rank correlation {rank:.3f}, its choice {part:.3f} of the best"
            )


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
    one.add_argument("--core", type=int, help="the CPU that this call works on, beside others")
    other = commands.add_parser("train")
    other.add_argument("-o", "--output", type=Path, required=True)
    other.add_argument("--steps", type=int, default=4000)
    other.add_argument("--ranking", type=float, default=1.0, help="the weight of the ranking loss; 0: none")
    other.add_argument("--only-ranking", action="store_true", help="no squared error")
    for command in (one, other):
        command.add_argument("file", type=Path)
        command.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    (gather if options.command == "gather" else learn)(options)


if __name__ == "__main__":
    main()
