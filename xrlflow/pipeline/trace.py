"""Traces as files, which `replay` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError
from xrlflow.search import TraceStep
from xrlflow.storage import files


@dataclass(frozen=True, slots=True)
class Trace:
    """The substitutions of an optimisation, in order. The first ones were applied before the search."""

    steps: tuple[TraceStep, ...]
    before: tuple[int, ...] = ()
    """The numbers of substitutions before the search: first in the model, then in each control-flow body, in the order
    in which `prepare.start` visits bodies.
    """

    @property
    def searched(self) -> tuple[TraceStep, ...]:
        """The substitutions that the search applied."""
        return self.steps[sum(self.before) :]


def write_trace(
    path: str | os.PathLike[str],
    model: str,
    steps: Iterable[TraceStep],
    before: Sequence[int],
    page: Mapping[str, Any],
) -> None:
    """Write a trace as JSON (see `Trace`), with the data of the report page. Raises ModelError if it cannot be
    written.
    """
    rows = [{"rule": s.rule, "family": s.family, "at": list(s.key[1]), "cost": s.cost} for s in steps]
    text = json.dumps({"model": model, "steps": rows, "before": list(before)}, indent=1).removesuffix("\n}")
    content = f'{text},\n "page": {json.dumps(page, allow_nan=False, separators=(",", ":"))}\n}}\n'
    try:
        files.write(path, content.encode())
    except OSError as error:
        raise ModelError(
            f"{os.fspath(path)}: cannot be written ({error.strerror}): choose another file"
        ) from error


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises OptionError if the file is not one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not isinstance(data["steps"], list):
            raise ValueError("it has no list of substitutions")
        steps = tuple(map(_step, data["steps"]))
        before = tuple(int(count) for count in data.get("before", ()))
        if min(before, default=0) < 0 or sum(before) > len(steps):
            raise ValueError("it has fewer substitutions than it says")
        return Trace(steps, before)
    except FileNotFoundError as error:
        raise OptionError(f"{path}: there is no such trace: check the path") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise OptionError(f"{path}: not a trace of xrlflow ({error}): write one with --trace") from error


def _step(row: Any) -> TraceStep:
    """A substitution in the format of `write_trace`. Raises ValueError, KeyError or TypeError."""
    rule, family, at, cost = row["rule"], row["family"], row["at"], row["cost"]
    if not isinstance(rule, str) or not isinstance(family, str):
        raise ValueError("the name of a rule is no text")
    if not isinstance(at, list) or not at or not all(type(value) is int for value in at):
        raise ValueError(f"{rule} has no numbers of nodes that it was applied at")
    return TraceStep(rule, family, (rule, tuple(at)), float(cost))
