"""A model as one value: a graph, with its size and its file, which are computed once, on first use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, Source, save, size_of
from xrlflow.storage.files import cannot_write

# How many of the latest artifacts stay in memory, and how many of these have a file. A comparison needs two files, and
# a candidate with generated kernels is compiled from a third one.
_REMEMBERED, _FILES = 64, 4


@dataclass(frozen=True, eq=False)
class Original:
    """The user's model: `source` as the user passed it. Sessions load `runnable`, other processes read `file`."""

    source: Source
    folder: str

    @cached_property
    def runnable(self) -> str | bytes:
        """The model as a runtime loads it: a path or bytes."""
        return runnable(self.source)

    @cached_property
    def file(self) -> str:
        """The path of the model as a file: the user's own file, or one in the temporary folder."""
        if not isinstance(self.runnable, bytes):
            return self.runnable
        file = Path(self.folder) / "original.onnx"
        try:
            file.write_bytes(self.runnable)
        except OSError as error:
            raise ModelError(cannot_write(file, error)) from error
        return str(file)


def runnable(source: Source) -> str | bytes:
    """The model as the runtime loads it: a path or bytes."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    serialized: bytes = source.SerializeToString()
    return serialized


@dataclass(frozen=True, eq=False)
class Artifact:
    """A graph of the imported model. Two artifacts with one `fingerprint` compute the same."""

    imported: ImportedModel
    graph: Graph
    _artifacts: Artifacts = field(repr=False)

    @property
    def fingerprint(self) -> int:
        return self.graph.fingerprint

    @cached_property
    def size(self) -> int:
        """The approximate size of the file in bytes. Constants are not evaluated for this estimate."""
        return size_of(self.imported, self.graph)

    @property
    def file(self) -> str:
        """The path of the artifact's file, which may exceed 2 GB. The file exists until `file` was called for four
        other artifacts.

        Raises ModelError if the graph cannot be written.
        """
        return self._artifacts.file_of(self)


@dataclass(slots=True, eq=False)
class Artifacts:
    """The artifacts of one optimisation, each once. Each file is in a new folder of its own inside `folder`."""

    folder: str
    _artifacts_by_key: OrderedDict[tuple[int, int], Artifact] = field(default_factory=OrderedDict, init=False)
    _files: OrderedDict[Artifact, str] = field(default_factory=OrderedDict, init=False)

    def of(self, imported: ImportedModel, graph: Graph) -> Artifact:
        """The artifact of a graph of this model."""
        key = (id(imported), graph.fingerprint)  # the artifact holds the model, so that its id stays unique
        artifact = self._artifacts_by_key.get(key)
        if artifact is None:
            artifact = self._artifacts_by_key[key] = Artifact(imported, graph, self)
        self._artifacts_by_key.move_to_end(key)
        if len(self._artifacts_by_key) > _REMEMBERED:
            self._artifacts_by_key.popitem(last=False)
        return artifact

    def file_of(self, artifact: Artifact) -> str:
        """See `Artifact.file`."""
        path = self._files.get(artifact)
        if path is None:
            path = os.path.join(tempfile.mkdtemp(dir=self.folder), "model.onnx")
            save(artifact.imported, artifact.graph, path, max_growth=float("inf"), durable=False)
            self._files[artifact] = path
        self._files.move_to_end(artifact)
        if len(self._files) > _FILES:
            _, old = self._files.popitem(last=False)
            shutil.rmtree(os.path.dirname(old))
        return path
