"""Reads a model's file without making a graph of it: a digest of all its data, and the names of its inputs."""

from __future__ import annotations

import hashlib
import os

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.external_data import data_files
from xrlflow.onnxio.tensors import TensorStore, map_file
from xrlflow.onnxio.wire import WireError, strip_model


def content_digest(path: str | os.PathLike[str]) -> str:
    """A digest of a model and its external data (64 hexadecimal digits). It changes if any byte changes.

    Data that cannot be read counts as missing; so does data outside the model's folder, which is not read. A file that
    is no model has a digest, too. Raises OSError if the model's own file cannot be read.
    """
    name = os.fspath(path)
    store = TensorStore.of_file(name)
    digest = hashlib.sha256(hashlib.sha256(store.data).digest())
    for location in sorted(data_files(name)):
        digest.update(hashlib.sha256(location.encode(errors="surrogatepass")).digest())
        try:
            digest.update(hashlib.sha256(store.file("", location)).digest())
        except ModelError:
            digest.update(b"missing")
    return digest.hexdigest()


def input_names(path: str | os.PathLike[str]) -> frozenset[str]:
    """The names of a model's inputs; none if the file cannot be read as a model."""
    try:
        proto = onnx.ModelProto.FromString(strip_model(map_file(os.fspath(path)).data))
    except (OSError, WireError, DecodeError):
        return frozenset()
    return frozenset(value.name for value in proto.graph.input)
