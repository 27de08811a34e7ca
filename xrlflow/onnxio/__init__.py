"""Reads ONNX files into graphs and writes graphs as ONNX files. Weights are not read before they are needed."""

from xrlflow.onnxio.errors import GrowthError, ModelError
from xrlflow.onnxio.exporter import (
    check,
    check_input,
    check_result,
    preferring,
    save,
    size_of,
    to_proto,
    written_opset,
)
from xrlflow.onnxio.external_data import data_files
from xrlflow.onnxio.importer import Source, load, name_of
from xrlflow.onnxio.model import ImportedModel, NodeLabel
from xrlflow.onnxio.original import save_original

__all__ = [
    "GrowthError",
    "ImportedModel",
    "ModelError",
    "NodeLabel",
    "Source",
    "check",
    "check_input",
    "check_result",
    "data_files",
    "load",
    "name_of",
    "preferring",
    "save",
    "save_original",
    "size_of",
    "to_proto",
    "written_opset",
]
