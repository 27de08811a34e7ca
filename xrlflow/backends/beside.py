"""The library of kernels that belongs to a model: `fast.so` in the folder of `fast.onnx`.

The digest in the name of a region's domain ties the two. A library of another model is not registered: its domain
would be that of no node.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

from xrlflow.backends.protocol import ModelSource

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


def domains_in(path: str | os.PathLike[str]) -> set[bytes]:
    """The domains of regions that a file names: a model or a library."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return set(_DOMAIN.findall(view))
