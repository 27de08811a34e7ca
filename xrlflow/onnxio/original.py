"""Writes the original model as the result, when a search has gained nothing."""

from __future__ import annotations

import os
from functools import partial
from typing import BinaryIO

import onnx

from xrlflow.onnxio import shapes
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.exporter import check_not_data_of
from xrlflow.onnxio.external_data import relocate, replacing_model
from xrlflow.onnxio.model import ImportedModel
from xrlflow.storage.files import cannot_write


def save_original(model: ImportedModel, path: str | os.PathLike[str]) -> None:
    """Write the model as it was read, byte for byte.

    External data is copied to the result's own files (see `external_data`), so only the names of these files differ. If
    the model is written to the file from which it was read, nothing changes. If it was read with `fix_shapes`, the
    dimensions differ. Raises ModelError if a file cannot be written, or if the model's own file was written to since it
    was read.
    """
    target = os.fspath(path)
    store = model.store
    store.check_unchanged()
    if (
        not model.fixed
        and store.path is not None
        and os.path.realpath(target) == os.path.realpath(store.path)
    ):
        return
    data = [partial(_write, data) for data in store.files.values()]
    try:
        check_not_data_of(model, target)
        with replacing_model(target, data) as (file, names):
            file.write(_changed(model, names) if model.fixed or names else store.data)
            store.check_unchanged()
    except OSError as error:
        raise ModelError(cannot_write(target, error)) from error


def _write(data: memoryview, file: BinaryIO) -> None:
    file.write(data)


def _changed(model: ImportedModel, names: list[str]) -> bytes:
    """The bytes of the model with new names of its data files and, if it was read with fixed shapes, with these."""
    proto = onnx.ModelProto.FromString(bytes(model.store.data))
    if model.fixed:
        shapes.fix(proto, model.bindings, outputs=True)
    relocate(proto, dict(zip(model.store.files, names)))
    changed: bytes = proto.SerializeToString()
    return changed
