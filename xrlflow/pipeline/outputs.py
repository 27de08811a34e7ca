"""Checks of the paths to which results are written."""

from __future__ import annotations

import os
from pathlib import Path

from xrlflow.backends.library_files import check_library_path
from xrlflow.backends.tvm import SUFFIX
from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError
from xrlflow.storage import files


def check_distinct_paths(**paths: str | os.PathLike[str] | None) -> None:
    """Raise OptionError if two of these paths lead to the same file."""
    names: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        real = Path(path).resolve()
        if real in names:
            raise OptionError(f"{name} and {names[real]} are one file, {os.fspath(path)}: name another")
        names[real] = name


def check_writable(path: str | os.PathLike[str], *, library: bool = False, kernels: bool = False) -> None:
    """Raise ModelError, OptionError or BackendError if a result cannot be written to this path.

    `library`: the result is a shared library. `kernels`: the result may have a library of kernels in the same folder.
    """
    target = Path(path)
    if kernels:
        check_library_path(target)
    if library and target.suffix != SUFFIX:
        raise OptionError(
            f"{target}: a compiled model is a shared library: give it a name that ends in {SUFFIX}"
        )
    folder = target.parent
    if target.is_dir():
        raise ModelError(f"{target}: is a folder: name the file to write")
    if not folder.is_dir():
        raise ModelError(f"{target}: there is no folder {folder}: create it first")
    try:
        files.check(target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written ({error.strerror}): choose another output") from error
