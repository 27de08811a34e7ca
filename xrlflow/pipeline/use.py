"""Runs optimised models: sessions with a model's library of kernels, and single runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from xrlflow.backends import BackendError
from xrlflow.backends.library_files import check_unedited, library_of
from xrlflow.backends.onnxruntime import Options, load_library, open_model, with_library
from xrlflow.backends.onnxruntime.reasons import reason
from xrlflow.backends.onnxruntime.session import ort_errors
from xrlflow.backends.protocol import one_line
from xrlflow.common.sizes import Shapes
from xrlflow.onnxio import ModelError, Source, load
from xrlflow.onnxio.regions import noted_rows
from xrlflow.options import OptionError, check_seed, check_shapes, check_threads
from xrlflow.pipeline.artifact import runnable
from xrlflow.storage import files
from xrlflow.verify import feeds_for_measurement
from xrlflow.verify.inputs import user_case

if TYPE_CHECKING:
    import onnxruntime as ort


def session(
    model: str | os.PathLike[str],
    options: ort.SessionOptions | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> ort.InferenceSession:
    """An ONNX Runtime session of a file, with the kernels of the library in its folder (`NAME.so`), if it has one.

    It equals `onnxruntime.InferenceSession(model, options, providers)` after
    `options.register_custom_ops_library("/its/folder/NAME.so")`. If the library cannot be loaded on this machine, or
    the model was edited after the library was written, the session runs without the library, with a warning. Raises
    ModelError if there is no such file, and what ONNX Runtime raises.
    """
    if not os.path.isfile(model):
        raise ModelError(f"{os.fspath(model)}: there is no such file: check the path")
    import onnxruntime as ort

    options = ort.SessionOptions() if options is None else options
    library = library_of(model)
    if library is not None:
        refusals: tuple[type[Exception], ...] = (BackendError, *ort_errors())
        try:
            check_unedited(model)
            load_library(options, library)
        except refusals as error:
            warnings.warn(f"{library}: not used: {reason(error)}", stacklevel=2)
    return ort.InferenceSession(os.fspath(model), options, providers=list(providers))


def rows_of_blocks(model: str | os.PathLike[str] | bytes) -> set[int]:
    """The numbers of rows around which kernels for any number of rows take other ways: other numbers are no test of
    them."""
    if isinstance(model, bytes):
        return set()
    return noted_rows(onnx.load(os.fspath(model), load_external_data=False))


def options_with_kernels(*models: str | os.PathLike[str] | bytes, required: bool = False) -> Options | None:
    """Session options with the libraries in the folders of these models; None if there are none.

    A library whose model was edited later is left out, with a warning. With `required`, such a library is an error,
    and so is the lack of any library: OptionError or BackendError is raised.
    """
    options: Options | None = None
    if required and not any(map(library_of, models)):
        names = ", ".join(os.fspath(model) for model in models if not isinstance(model, bytes))
        raise OptionError(f"kernels: no library in the folder belongs to {names or 'the model'}")
    libraries = {library: model for model in models if (library := library_of(model)) is not None}
    for library, model in libraries.items():
        assert not isinstance(model, bytes)
        try:
            check_unedited(model)
        except BackendError as error:
            if required:
                raise
            warnings.warn(f"{library}: not used: {error}", stacklevel=2)
            continue
        options = with_library(options, library)
    return options


def run_once(
    model: Source,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    shapes: Shapes | None = None,
    threads: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The outputs of a model by name, on the user's inputs or on random ones, run with the library of kernels in its
    folder.

    Raises ModelError, VerificationError for inputs that do not fit, OptionError, and BackendError if the model does
    not run.
    """
    check_seed(seed)
    check_shapes(shapes)
    check_threads(threads, None)
    imported = load(model, shapes=shapes)
    source = runnable(model)
    with open_model(source, threads=threads, session_options=options_with_kernels(source)) as opened:
        if inputs is not None:
            feeds = dict(user_case(imported, inputs).feeds)
        else:
            opened.check_types()
            feeds = dict(feeds_for_measurement(imported, seed, opened.run))
        return dict(zip(opened.output_names, opened.run(feeds), strict=True))


def save_outputs(outputs: Mapping[str, Any], path: Path) -> None:
    """Write outputs as an .npz file, completely or not at all. Raises BackendError."""
    arrays = {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}
    if other := sorted(outputs.keys() - arrays.keys()):
        raise BackendError(f"output {other[0]} is no tensor, and an .npz file has tensors only")
    if text := sorted(name for name, array in arrays.items() if array.dtype.kind == "O"):
        arrays.update({name: arrays[name].astype(str) for name in text})
    try:
        with files.replacing(path) as file:
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise BackendError(f"{path}: cannot be written: {error.strerror or one_line(error)}") from error
