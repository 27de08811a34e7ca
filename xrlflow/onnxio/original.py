"""The original, given back when nothing better was found."""

from __future__ import annotations

import os

import onnx

from xrlflow.onnxio import shapes
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.exporter import replacing
from xrlflow.onnxio.model import ImportedModel


def save_original(model: ImportedModel, path: str | os.PathLike[str]) -> None:
    """Write the model as it was read, byte for byte, and its external data beside it.

    If the model was read with `fix_shapes`, the dimensions differ and nothing else. Raises ModelError if a file
    cannot be written.
    """
    target = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(target))
    store = model.store
    try:
        if store.path is not None and folder != os.path.dirname(os.path.abspath(store.path)):
            for location, data in store.files.items():
                copy = os.path.join(folder, location)
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                with replacing(copy) as file:
                    file.write(data)
        with replacing(target) as file:
            file.write(_with_fixed_shapes(model) if model.fixed else store.data)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written ({error.strerror}): choose another output") from error


def _with_fixed_shapes(model: ImportedModel) -> bytes:
    proto = onnx.ModelProto.FromString(bytes(model.store.data))
    shapes.fix(proto, model.bindings)
    fixed: bytes = proto.SerializeToString()
    return fixed
