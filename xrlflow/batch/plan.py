"""Plans the jobs of a batch: the path of each result, and the data on which it depends."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from xrlflow.backends.tvm import SUFFIX
from xrlflow.batch.jobs import Job
from xrlflow.batch.sources import SourceFile
from xrlflow.onnxio.content import content_digest
from xrlflow.options import OptionError, Options
from xrlflow.report.page.environment import version_of

_ONNX = ".onnx"
_CONTENTS = ("agent", "rules", "inputs")
"""Options that name a file on whose content the result depends."""
_PACKAGES = ("xrlflow", "onnxruntime")
_COMPILER = "apache-tvm"
"""The package whose version matters unless ONNX Runtime alone runs the result."""
_PLACES = ("store",)
"""Options that name a path where something is stored. Results do not depend on them."""


def plan(sources: Iterable[SourceFile], output: Path, options: Options) -> list[Job]:
    """A job for each model. Reads the models to compute their keys.

    The result of `a/x.onnx` is `OUTPUT/a/x.onnx`, and that of `a/x.pb` `OUTPUT/a/x.pb.onnx`; compiled ones end in
    `.so`. Raises OptionError for options that have no meaning in a batch.
    """
    asked = _depends_on(options)
    options = _anywhere(options)
    jobs: list[Job] = []
    used_targets: set[str] = set()
    root = os.path.abspath(output)
    for each in sources:
        target = _free(_target(each.name, options.compiling), used_targets)
        used_targets.add(target.casefold())
        source, key = os.path.abspath(each.path), _key(each.path, asked)
        jobs.append(Job(each.name, source, root, target, key, options, each.remarks))
    return jobs


def key_of(source: str, options: Options) -> str:
    """The key of a model with these options, on this machine, now. Raises OptionError."""
    return _key(source, _depends_on(options))


def versions() -> str:
    """The versions of packages on which results depend, for messages."""
    return ", ".join(f"{package} {version_of(package)}" for package in (*_PACKAGES, _COMPILER))


def _target(name: str, compiled: bool) -> str:
    suffix = SUFFIX if compiled else _ONNX
    return name.removesuffix(_ONNX) + suffix


def _free(target: str, used_targets: set[str]) -> str:
    """The target, with a number added if another model has the same target on some file system."""
    stem, suffix = os.path.splitext(target)
    number = 1
    while target.casefold() in used_targets:
        number += 1
        target = f"{stem}-{number}{suffix}"
    return target


def _key(path: str, asked: str) -> str:
    try:
        content = content_digest(path)
    except OSError as error:  # the job will report this error
        content = f"not read: {error.strerror}"
    return hashlib.sha256(f"{content}\n{asked}".encode()).hexdigest()


def _depends_on(options: Options) -> str:
    """Everything besides the model on which results depend, as text: options, contents of files, versions. Raises
    OptionError.
    """
    values = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _PLACES}
    if values["replay"] is not None:
        raise OptionError("replay has no meaning for a batch: a trace is of one model")
    for name, kind in (
        ("cost", str),
        ("session_options", Mapping),
        ("inputs", (str, os.PathLike)),
        ("remote", str),
    ):
        if values[name] is not None and not isinstance(values[name], kind):
            raise OptionError(
                f"{name} is an object, which cannot be sent to other processes: name it, or leave it out"
            )
    for name in _CONTENTS:
        if values[name] is not None:
            try:
                values[name] = _digest(Path(values[name]))
            except OSError as error:
                raise OptionError(f"{name} {values[name]} cannot be read ({error.strerror})") from error
    packages = _PACKAGES if options.backend == "onnxruntime" else (*_PACKAGES, _COMPILER)
    values |= {package: version_of(package) for package in packages}
    return json.dumps(values, sort_keys=True, default=_plain)


def _digest(path: Path) -> str:
    """The digest of a file, or of the files of a folder of inputs. Raises OSError."""
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digests = [f"{file.name} {_digest(file)}" for file in sorted(path.glob("*.npz"))]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _anywhere(options: Options) -> Options:
    """The options with absolute paths, since a job may run in another working directory."""
    names = _CONTENTS if options.server is not None else (*_CONTENTS, *_PLACES)
    values: dict[str, Any] = {name: getattr(options, name) for name in names}
    return replace(
        options, **{name: os.path.abspath(path) for name, path in values.items() if path is not None}
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else list(value)
