"""Finds the models of a batch: the models in a folder, those that match a pattern, or those of a list of paths."""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from xrlflow.options import OptionError

MARK = ".xrlflow_batch"
"""The file that marks a folder as the output of a batch."""
_MODEL = ".onnx"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The file of a model: its path, and its name in the batch (a relative path with slashes, without `..`)."""

    name: str
    path: str
    remarks: tuple[str, ...] = ()


def find_models(models: str | os.PathLike[str], output: Path) -> list[SourceFile]:
    """The models that `models` (FOLDER, GLOB or LIST) names, each file once, sorted by name.

    - A folder: its `*.onnx` files, also in subfolders and behind links. Folders that are the output of a
      batch, and hidden ones, are left out.
    - A pattern (`*`, `?`, `[...]`, `**`): the files that it matches.
    - A list: a text file with a path on each line, relative to its own folder; `#` begins a comment. A pipe is a list
      with paths relative to the working directory; `-` is standard input.

    A model that has several paths gets the first of its names. Raises OptionError if there is no model, if `models` is
    itself a model, or if a list cannot be read, or names a model in the output folder.
    """
    text = "/dev/stdin" if models == "-" else os.fspath(models)
    if os.path.isdir(text):
        if os.path.realpath(text) == os.path.realpath(output):
            raise OptionError(
                f"{text} is the output folder, too: its models would be written over: choose another output"
            )
        files, missing = _in_folder(text, output), f"{text}: there is no model (*{_MODEL}) in this folder"
    elif os.path.exists(text):
        files, missing = _listed(Path(text), output), f"{text}: this list names no model"
    elif glob.has_magic(text):
        files, missing = _matching(text, output), f"{text}: no file matches"
    else:
        raise OptionError(f"{text}: there is no such folder, pattern or list: check the path")
    if not files:
        raise OptionError(f"{missing}: check the path")
    return sorted(_once(files), key=lambda each: each.name)


def _in_folder(folder: str, output: Path) -> list[SourceFile]:
    """The models of a folder. Each folder is visited once. Links are followed last, so that models have their real
    paths.
    """
    files: list[SourceFile] = []
    visited: set[str] = set()
    tops = deque([folder])
    while tops:
        for directory, folders, names in os.walk(tops.popleft(), onerror=_unreadable):
            real = os.path.realpath(directory)
            if real in visited or _is_within(real, output) or (directory != folder and _is_output(directory)):
                folders.clear()
                continue
            visited.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            tops += [path for name in folders if os.path.islink(path := os.path.join(directory, name))]
            for name in names:
                path = os.path.join(directory, name)
                if name.endswith(_MODEL) and not name.startswith("."):
                    files.append(SourceFile(_slashes(os.path.relpath(path, folder)), path))
    return files


def _unreadable(error: OSError) -> NoReturn:
    """Raise OptionError for a folder that cannot be read, whose models would be missing without notice."""
    raise OptionError(
        f"{error.filename}: cannot be read ({error.strerror}): let it be read, or give a pattern or a list"
    ) from error


def _matching(pattern: str, output: Path) -> list[SourceFile]:
    """The files that match the pattern. Their names are relative to the last folder before the pattern's first
    wildcard.
    """
    fixed: list[str] = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    base = os.path.join("", *fixed) or "."
    files = []
    for path in glob.iglob(pattern, recursive=True):
        name = os.path.relpath(path, base)
        between = [os.path.join(base, *Path(name).parts[:depth]) for depth in range(1, len(Path(name).parts))]
        if not (os.path.isdir(path) or _is_within(path, output) or any(map(_is_output, between))):
            files.append(SourceFile(_slashes(name), path))
    return files


def _listed(file: Path, output: Path) -> list[SourceFile]:
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise OptionError(
            f"{file}: cannot be read ({error.strerror}): give a folder, pattern or list"
        ) from error
    if file.suffix == _MODEL or "\0" in text:
        raise OptionError(
            f"{file}: is no list of paths: give a folder, a pattern or a list, or use `xrlflow optimize`"
        )
    files = []
    base = os.path.abspath(file.parent if file.is_file() else ".")
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        path = os.path.normpath(os.path.join(base, os.path.expanduser(_uncommented(written))))
        if _is_within(path, output):
            raise OptionError(f"{file}:{number}: {path} is in the output folder: choose another output")
        inside = os.path.commonpath([base, path]) == base
        files.append(
            SourceFile(_slashes(os.path.relpath(path, base) if inside else path.lstrip(os.sep)), path)
        )
    return files


def _uncommented(line: str) -> str:
    """A line without the comment at its end. A comment begins with `#` after a blank."""
    for blank in (" #", "\t#"):
        line = line.partition(blank)[0]
    return line.rstrip()


def _is_within(path: str, output: Path) -> bool:
    """Whether a path, or the target of a link at this path, is the output folder or inside it."""
    ours = os.path.realpath(output)
    return os.path.commonpath([ours, os.path.realpath(path)]) == ours


def _is_output(folder: str) -> bool:
    """Whether a folder is the output of a batch."""
    return os.path.exists(os.path.join(folder, MARK))


def _slashes(path: str) -> str:
    """A relative path without `..`, with slashes."""
    return "/".join(part for part in Path(path).parts if part not in ("..", os.sep))


def _once(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """Each file once, under the first of its names that is no link, or else under the first name. A remark lists its
    other names.
    """
    by_file: dict[str, list[SourceFile]] = {}
    for each in sorted(files, key=lambda each: (os.path.islink(each.path), each.name)):
        by_file.setdefault(os.path.realpath(each.path), []).append(each)
    for first, *further in by_file.values():
        names = sorted({other.name for other in further} - {first.name})
        yield replace(first, remarks=(f"also reached as {', '.join(names)}",)) if names else first
