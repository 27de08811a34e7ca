"""Traces as files: `replay` reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xrlflow import files
from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError
from xrlflow.search import TraceStep


def write_trace(
    path: str | os.PathLike[str], model: str, steps: Iterable[TraceStep], page: Mapping[str, Any]
) -> None:
    """Write a trace as JSON, with the data of its page. Raises ModelError if the file cannot be written."""
    rows = [{"rule": s.rule, "family": s.family, "at": list(s.key[1]), "cost": s.cost} for s in steps]
    told = json.dumps({"model": model, "steps": rows}, indent=1).removesuffix("\n}")
    content = f'{told},\n "page": {json.dumps(page, allow_nan=False, separators=(",", ":"))}\n}}\n'
    try:
        files.write(path, content.encode())
    except OSError as error:
        raise ModelError(
            f"{os.fspath(path)}: cannot be written ({error.strerror}): choose another file"
        ) from error


def read_trace(path: str | os.PathLike[str]) -> tuple[TraceStep, ...]:
    """Read a trace. Raises OptionError if the file is not one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return tuple(
            TraceStep(s["rule"], s["family"], (s["rule"], tuple(s["at"])), s["cost"]) for s in data["steps"]
        )
    except FileNotFoundError as error:
        raise OptionError(f"{path}: there is no such trace: check the path") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(f"{path}: not a trace of xrlflow ({error}): write one with --trace") from error
