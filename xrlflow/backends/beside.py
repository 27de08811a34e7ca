"""The library of kernels that belongs to a model: `fast.so` in the folder of `fast.onnx`.

The digest in the name of a region's domain ties the two. A library of another model is not registered: its domain
would be that of no node.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

from xrlflow.backends.protocol import BackendError, ModelSource

SUFFIX = ".so"
_DOMAIN = re.compile(rb"xrlflow\.[0-9a-f]{16}(?![0-9a-f])")


def library_path(model: str | os.PathLike[str]) -> Path:
    """Where the library of a model is: under its name, with the suffix of a shared library."""
    return Path(model).with_suffix(SUFFIX)


def library_of(model: ModelSource) -> str | None:
    """The path of the library with a model's kernels; None for a model without one."""
    if isinstance(model, bytes):
        return None
    library = library_path(model)
    if not library.is_file() or not os.path.isfile(model):
        return None
    found = domains_in(model)
    return os.path.abspath(library) if found & domains_in(library) else None


def check_library_path(model: str | os.PathLike[str]) -> None:
    """Raise BackendError if the library of a model that is to be written would replace another file."""
    library = library_path(model)
    if library == Path(model):
        raise BackendError(
            f"{library}: is a model's name as a library: give it another suffix, such as .onnx"
        )
    if library.is_dir() or (library.exists() and library.stat().st_size and not domains_in(library)):
        raise BackendError(
            f"{library}: xrlflow did not write this: choose another name for {Path(model).name}, or --portable"
        )


def domains_in(path: str | os.PathLike[str]) -> set[bytes]:
    """The domains of regions that a file names: a model or a library."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return set(_DOMAIN.findall(view))
