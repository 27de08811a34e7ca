"""The library of kernels that belongs to a model: `fast.so` next to `fast.onnx`, `fast.ort.so` next to `fast.ort`.

The model and its library contain the same names of operator domains, one for each region. Such a name has a digest of
the kernels' code, and a digest of what the region computes in the file. So the library of another model is never used:
it has none of this model's domains. `check_unedited` finds out whether the file was edited after its kernels were
compiled.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

from xrlflow.backends.protocol import BackendError, ModelSource
from xrlflow.onnxio.region_digest import DIGITS, digest_of_file

SUFFIX = ".so"
_ONNX = ".onnx"
_DOMAIN = re.compile(rb"xrlflow\.[0-9a-f]{32}(?![0-9a-f])")


def library_path(model: str | os.PathLike[str]) -> Path:
    """The path of a model's library: `.so` takes the place of `.onnx`, and is appended to any other name.

    Another suffix stays, because two models in one folder may differ by their suffixes only.
    """
    path = Path(model)
    return path.with_suffix(SUFFIX) if path.suffix == _ONNX else path.with_name(path.name + SUFFIX)


def library_of(model: ModelSource) -> str | None:
    """The path of the library with a model's kernels; None for a model without one."""
    if isinstance(model, bytes):
        return None
    library = library_path(model)
    if not library.is_file() or not os.path.isfile(model):
        return None
    domains = domains_in(model)
    return os.path.abspath(library) if domains & domains_in(library) else None


def check_unedited(model: str | os.PathLike[str]) -> None:
    """Raise BackendError if a model was edited after its kernels were compiled, because the kernels still compute what
    the model was before the edit."""
    for domain in {name.decode() for name in domains_in(model) & domains_in(library_path(model))}:
        if digest_of_file(model, domain) != domain[-DIGITS:]:
            raise BackendError(
                f"{os.fspath(model)}: was edited after the kernels in {library_path(model).name} were compiled, which "
                "compute what it was before: optimise it again, or remove them"
            )


def check_library_path(model: str | os.PathLike[str]) -> None:
    """Raise BackendError if the library of a model that is about to be written would replace a file that is no library,
    or the library of another model."""
    library = library_path(model)
    if Path(model).suffix == SUFFIX:
        raise BackendError(
            f"{os.fspath(model)}: is a model's name as a library: give it another suffix, such as .onnx"
        )
    if library.is_dir() or (library.exists() and library.stat().st_size and not domains_in(library)):
        raise BackendError(
            f"{library}: xrlflow did not write this: choose another name for {Path(model).name}, or --portable"
        )
    for other in (library.with_suffix(_ONNX), library.with_suffix("")):
        if other != Path(model) and library_of(other) is not None:
            raise BackendError(
                f"{library}: has the kernels of {other.name}: choose another name for {Path(model).name}, or --portable"
            )


def domains_in(path: str | os.PathLike[str]) -> set[bytes]:
    """The domains of regions whose names occur in a file, which is a model or a library."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return set(_DOMAIN.findall(view))
