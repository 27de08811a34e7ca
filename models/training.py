"""The training graphs of the general agent. See `xrlflow.rl.curriculum`.

    sources = training_sources()
    curriculum = curriculum(seed=0)     # makes the task of xrlflow.rl.train.train

The graphs are networks at small depth (also after random substitutions, and then without composite rules), half of the
exported networks, random graphs of rules' sources, and valleys. Tests use graphs that are not in training: the
architectures in `UNSEEN`, the exports in `exports.HELD_OUT`, networks of more than four blocks, the held-out family of
valleys, and all instances of `models.valleys.catalogue`, whose seeds are below `_FIRST_SEED`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import models
from models import exports, precision
from models.rule_graphs import rule_graph
from models.valleys import COMPOSITES, EXCLUDED, FAMILIES, Valley
from rewrite_rules import LIBRARY
from xrlflow.cost import Machine
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.rl.curriculum import Curriculum, Source, mixed, split

# Architectures that are held out of all training.
UNSEEN = frozenset({"inceptionv3", "mobilenetv2", "gru-unrolled", "dalle", "unet", "yolo"})

# Options besides those of `models.small`. Depths range from that of `models.small` to four blocks.
_WIDER: Mapping[str, tuple[Mapping[str, int], ...]] = MappingProxyType(
    {
        "resnet18": ({"width": 32, "image": 56},),
        "resnet50": ({"width": 32, "image": 56},),
        "resnext50": ({"width": 32, "image": 56}, {"width": 64, "image": 56}),
        "squeezenet": ({"width": 32, "image": 112},),
        "efficientnet-b0": ({"width": 32, "image": 64},),
        "nasnet-a": ({"width": 16, "image": 56}, {"width": 32, "image": 56}),
        "nasrnn": ({"width": 128},),
        "nasrnn-shared": ({"width": 128},),
        "lstm-unrolled": ({"width": 128},),
        "bert": ({"width": 256, "tokens": 64},),
        "bert-classifier": ({"width": 256, "tokens": 64},),
        "vit": ({"width": 256, "image": 96},),
        "vit-classifier": ({"width": 256, "image": 96},),
        "gpt2": ({"width": 256, "tokens": 32},),
        "transformer-transducer": ({"width": 256, "frames": 48, "labels": 8},),
    }
)
_MAX_DEPTH = 4
# The first seed and the number of seeds of valleys for training; the catalogue has lower seeds.
_FIRST_SEED, _SEEDS = 1000, 24
_RULE_GRAPHS = 1500
# The kinds of problems of a training run.
SHARES: Mapping[str, float] = MappingProxyType({"zoo": 0.3, "rules": 0.3, "valleys": 0.4})


def network(name: str, depth: int, options: tuple[tuple[str, int], ...]) -> Graph:
    """A network of the zoo as a graph."""
    return load(models.build(name, depth, **dict(options))).graph


def exported(name: str) -> Graph:
    """A small network that PyTorch exports (models/exports.py; cached)."""
    return load(exports.export(name, small=True)).graph


def valley(family: str, depth: int, width: int, seed: int) -> Graph:
    return load(Valley(FAMILIES[family], depth, width, seed).model()).graph


def machine(family: str) -> Machine:
    """The machine for whose costs a family's networks have valleys."""
    return FAMILIES[family].machine


def random_rules(seed: int, pieces: int) -> Graph:
    return rule_graph(LIBRARY, seed, pieces)


def zoo_sources() -> Iterator[Source]:
    """Networks of up to four blocks (or the fewest possible), in several widths, also after random substitutions."""
    for name, model in models.ZOO.items():
        if name in UNSEEN:
            continue
        for options in (model.small_options, *_WIDER.get(name, ())):
            for depth in range(model.small_depth, max(model.small_depth, _MAX_DEPTH) + 1):
                sizes = tuple(sorted(options.items()))
                for folded in (True, False) if "fold_batchnorm" in model.options else (True,):
                    settings = sizes if folded else (*sizes, ("fold_batchnorm", 0))
                    label = "-".join(f"{k}{v}" for k, v in settings)
                    build = functools.partial(network, name, depth, settings)
                    yield Source(f"{name}-{depth}-{label}", "zoo", build)
                    yield Source(
                        f"{name}-{depth}-{label}-scrambled", "zoo", build, 6, without=frozenset(COMPOSITES)
                    )


def export_sources() -> Iterator[Source]:
    """Exported networks at small size, without the held-out networks; also after random substitutions."""
    for name in exports.EXPORTS:
        if name not in exports.HELD_OUT:
            build = functools.partial(exported, name)
            yield Source(f"{name}-export", "zoo", build)
            yield Source(f"{name}-export-scrambled", "zoo", build, 6, without=frozenset(COMPOSITES))


def low_precision(name: str) -> Graph:
    """A small file of models/precision.py."""
    return load(precision.build(name, small=True)).graph


def precision_sources() -> Iterator[Source]:
    """Small networks in low precision, without the held-out files. They are in no curriculum yet."""
    for name in precision.FILES:
        if name not in precision.HELD_OUT:
            yield Source(name, "precision", functools.partial(low_precision, name))


def rule_sources(count: int = _RULE_GRAPHS) -> Iterator[Source]:
    """Graphs that consist of two to five sources of rules; two of three are changed by random substitutions."""
    for seed in range(count):
        build = functools.partial(random_rules, seed, 2 + seed % 4)
        yield Source(f"rules-{seed}", "rules", build, scrambled=2 * (seed % 3))


def valley_sources() -> Iterator[Source]:
    """Instances of the families that are not held out."""
    for family in FAMILIES.values():
        if family.held_out:
            continue
        for depth, width in family.shapes:
            for seed in range(_FIRST_SEED, _FIRST_SEED + _SEEDS):
                yield Source(
                    Valley(family, depth, width, seed).name,
                    "valleys",
                    functools.partial(valley, family.name, depth, width, seed),
                    machine=functools.partial(machine, family.name),
                    without=EXCLUDED,
                )


def training_sources() -> Iterator[Source]:
    yield from zoo_sources()
    yield from export_sources()
    yield from rule_sources()
    yield from valley_sources()


def curriculum(count: int = 800, held_out: int = 60, seed: int = 0) -> Curriculum:
    """About `count` graphs to train on, and `held_out` other graphs to evaluate on, of each kind by its share in
    `SHARES`."""
    train, test = split(training_sources(), 0.1)
    return Curriculum(
        mixed(train, SHARES, count, seed), mixed(test, SHARES, held_out, seed), LIBRARY, seed=seed
    )
