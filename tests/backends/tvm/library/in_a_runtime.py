"""Checks a folder that `python -m tests.backends.tvm.library.carried` wrote with the ONNX Runtime of this environment.

It needs only ONNX Runtime and NumPy: `make test-runtimes` runs it with old and new versions of them.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

OLD = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 17)
"""Whether this ONNX Runtime loads libraries of kernels, but runs the models without them."""
CLOSE = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


def session(file: Path, *libraries: Path, threads: int = 2, parallel: bool = False) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if parallel:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    for library in libraries:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def identical(a: list[Any], b: list[Any]) -> None:
    for x, y in zip(a, b):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def close(a: list[Any], b: list[Any]) -> None:
    for x, y in zip(a, b):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        bound = CLOSE.get(str(x.dtype), 0.0)
        np.testing.assert_allclose(np.asarray(y, float), np.asarray(x, float), rtol=bound, atol=bound)


def fails(running: Any, feeds: dict[str, Any], text: str) -> None:
    """Check that the run raises an error with this text (a regular expression)."""
    said = "no error"
    try:
        running.run(None, feeds)
    except Exception as error:  # of a class of ONNX Runtime's, which have no common base
        said = str(error)
    assert re.search(text, said), said


def check_results(folder: Path, name: str) -> None:
    """Compare a model's results with those of the plain model.

    They must be close with the library of kernels, and identical without it or with a library that does not fit.
    """
    file, library = folder / f"{name}.onnx", folder / "kernels.so"
    feeds = dict(np.load(folder / f"{name}.npz"))
    expected = session(folder / f"{name}.plain.onnx").run(None, feeds)
    identical(expected, session(file).run(None, feeds))
    identical(expected, session(file, folder / "foreign.so").run(None, feeds))
    if OLD:
        identical(expected, session(file, library).run(None, feeds))
        return
    for threads in (1, 2, 4):
        close(expected, session(file, library, threads=threads).run(None, feeds))
    close(expected, session(file, library, parallel=True).run(None, feeds))
    close(expected, session(file, library, library, folder / "foreign.so", library).run(None, feeds))
    running = session(file, library)
    with ThreadPoolExecutor(6) as pool:
        for result in pool.map(lambda _: running.run(None, feeds), range(30)):
            close(expected, result)


def check_errors(folder: Path) -> None:
    """Check the errors for sizes that were not compiled and for an index outside of its table. The session must remain
    usable."""
    for name, changed, text in (
        ("symbolic", {"x": np.ones((5, 8), np.float32), "other": np.ones((5, 8), np.float32)}, r"\[3, 8\]"),
        ("gather", {"index": np.array([0, 1, 6, 2], np.int64)}, "index 6 .*outside of its table"),
    ):
        feeds = dict(np.load(folder / f"{name}.npz"))
        running = session(folder / f"{name}.onnx", folder / "kernels.so")
        expected = running.run(None, feeds)
        fails(running, {**feeds, **changed}, text)
        identical(expected, running.run(None, feeds))


def check_kernels_run(folder: Path) -> None:
    """Check that kernels run: this model's kernels compute something else than its function, so the results must
    differ."""
    feeds = dict(np.load(folder / "symbolic.npz"))
    body = session(folder / "other-body.onnx").run(None, feeds)[0]
    kernels = session(folder / "other-body.onnx", folder / "kernels.so").run(None, feeds)[0]
    assert np.abs(body - kernels).max() > 0.1


def main(folder: Path) -> None:
    names = sorted(file.stem for file in folder.glob("*.npz"))
    assert names
    for name in names:
        check_results(folder, name)
    if not OLD:
        check_errors(folder)
        check_kernels_run(folder)
    kernels = "without kernels, which need 1.17" if OLD else "with kernels and without"
    print(f"ONNX Runtime {ort.__version__}: {len(names)} models are correct {kernels}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
