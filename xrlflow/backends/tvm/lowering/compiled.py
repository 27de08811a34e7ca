"""A compiled model: it can be run, timed, saved as a shared library, and loaded without the parts of TVM that tune."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.backends.limits import default_threads
from xrlflow.backends.protocol import Array, BackendError, Feeds, ModelSource, one_line, same_feeds
from xrlflow.backends.tvm.fusion.checks import Check, checks_from, checks_of, complain
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, AlgorithmChoice, Algorithms
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine, compiler, lacking, linker
from xrlflow.storage import files

if TYPE_CHECKING:
    from typing_extensions import Self

SUFFIX = ".so"
_VERSION = 3


@dataclass(frozen=True, slots=True)
class Value:
    """An input of a compiled model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interface:
    """What a compiled model reads and returns, and the processor and version of TVM that it was compiled for. With
    `checks` the model has one more output after `outputs`: the numbers to check."""

    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    triple: str
    cpu: str
    version: str
    checks: tuple[Check, ...] = ()

    def results(self, values: Sequence[Array]) -> list[Array]:
        """The outputs of the model without the numbers to check. Raises BackendError for an index outside its table."""
        if not self.checks:
            return list(values)
        complain(self.checks, values[-1])
        return list(values[:-1])


class TvmModel:
    """A model that was compiled for fixed sizes, loaded in this process. See `CompiledModel`.

    Calls from several threads run one after the other. `chosen`: the algorithms that were chosen for layers, if the
    model was compiled in this process.
    """

    def __init__(
        self, executable: Any, interface: Interface, threads: int, chosen: tuple[AlgorithmChoice, ...] = ()
    ) -> None:
        self._executable: Any = executable
        self._machine: Any = None
        self._settled: int | None = None  # the descriptor of the library file (see `settle`)
        self.interface = interface
        self.threads = threads
        self.chosen = chosen
        # TVM's virtual machine has one stack of calls: two simultaneous calls would use each other's registers.
        self._lock = threading.Lock()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.interface.inputs)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input for which the model was compiled, by name."""
        return {value.name: value.shape for value in self.interface.inputs}

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.interface.outputs

    def run(self, feeds: Feeds) -> Sequence[Any]:
        """The outputs, in the order of `output_names`.

        Raises BackendError for inputs of other shapes or types, and for indices outside their tables.
        """
        return self._call(self._arguments(feeds))

    def caller(self, feeds: Feeds) -> Callable[[], object]:
        """A function that runs the model once on `feeds`, with arrays as inputs and outputs, as a user's program
        would."""
        arrays = same_feeds(feeds)
        self.run(arrays)
        return lambda: self._call(self._arguments(arrays))

    def bound_caller(self, feeds: Feeds) -> Callable[[], object]:
        """Like `caller`, but inputs and outputs are not converted from and to arrays: for operators that are timed
        alone."""
        arguments = self._arguments(same_feeds(feeds))
        self._call(arguments)
        main = self._started()["main"]
        return lambda: main(*arguments)

    def close(self) -> None:
        """Release the code, the weights and the memory plan."""
        self._machine = self._executable = None
        if self._settled is not None:
            self._release()
            self._settled = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arguments(self, feeds: Feeds) -> list[Any]:
        tensor = tvm().runtime.tensor
        return [tensor(array, tvm().cpu()) for array in arguments_of(self.interface, feeds)]

    def _started(self) -> Any:
        """The loaded code. It is loaded at the first call, since it may be for another processor."""
        if (
            self._settled is not None and self._executable is None
        ):  # `_settle` did not load it: another processor
            check_runs_here(self.interface)
        if self._executable is None:
            raise BackendError("this model has been closed")
        if self._machine is None:
            check_runs_here(self.interface)
            from tvm import relax

            self._machine = relax.VirtualMachine(self._executable, tvm().cpu())
        return self._machine

    def _call(self, arguments: Sequence[Any]) -> list[Any]:
        with self._lock:
            machine = self._started()
            _use_threads(self.threads)
            result = machine["main"](*arguments)
        values = [result] if hasattr(result, "numpy") else list(result)
        return self.interface.results([value.numpy() for value in values])

    def settle(self, path: str | os.PathLike[str]) -> None:
        """Save the model to a temporary file. Later runs and saves use this file, because TVM would generate the
        machine code anew for each of them. The file may be removed, but nobody may write to it. Raises BackendError."""
        self.save(path)
        self._settle(path)

    @staticmethod
    def settled(
        path: str | os.PathLike[str], interface: Interface, threads: int, chosen: tuple[AlgorithmChoice, ...]
    ) -> TvmModel:
        """The model that another process has saved to a temporary file at `path`. Raises BackendError."""
        model = TvmModel(None, interface, threads, chosen)
        model._settle(path)
        return model

    def _settle(self, path: str | os.PathLike[str]) -> None:
        self._settled = os.open(path, os.O_RDONLY)
        self._release = weakref.finalize(self, os.close, self._settled)
        if not lacking(self.interface.triple, self.interface.cpu):
            self._executable, self._machine = _loaded(Path(path)), None

    def _export(self, library: Path, link: str) -> None:
        if self._settled is None:
            if self._executable is None:
                raise BackendError("this model has been closed")
            with _silent():
                linked = _linked_by(self.interface.triple, link)
                self._executable.export_library(str(library), fcompile=linked)
            return
        with self._lock, open(self._settled, "rb", closefd=False) as source, library.open("wb") as copy:
            source.seek(0)
            shutil.copyfileobj(source, copy)
        os.chmod(library, stat.S_IMODE(os.fstat(self._settled).st_mode))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as one shared library with its weights, and its interface as a `.json` file in the same
        folder.

        The files are written completely or not at all. The interface file also describes the library that is replaced,
        in case the process ends after writing only one of the two files. Raises BackendError if there is no linker (a C
        compiler), if linking fails, or if a file cannot be written.
        """
        target = Path(path)
        if target.suffix != SUFFIX:
            raise BackendError(f"{target}: a compiled model is a shared library, its name ends in {SUFFIX}")
        link = linker(self.interface.triple)
        if link is None:
            raise BackendError(
                f"{target}: writing a shared library needs {compiler(self.interface.triple)} to link it"
            )
        try:
            target = Path(files.destination(path))
            interface_file = _description(target)
            if interface_file.exists() and not target.exists() and not _is_description(interface_file):
                raise BackendError(
                    f"{interface_file}: xrlflow did not write this: choose another name for {target.name}"
                )
            with tempfile.TemporaryDirectory(prefix=files.UNFINISHED, dir=target.parent) as folder:
                library, description = Path(folder) / target.name, Path(folder) / "interface.json"
                self._export(library, link)
                stored = {"format": _VERSION, "digest": _digest(library), **asdict(self.interface)}
                if target.is_file() and interface_file.is_file():
                    stored["replaced"] = _described(target)
                description.write_text(json.dumps(stored, indent=1))
                files.put(description, interface_file)
                files.put(library, target)
        except OSError as error:
            raise BackendError(files.cannot_write(target, error)) from error
        except RuntimeError as error:  # TVM's, with the linker's output
            raise BackendError(f"{target}: cannot be built: {one_line(error)}") from error


def _described(library: Path) -> dict[str, Any] | None:
    """The description of the library that is now at this path (see `save`); None if no description fits."""
    try:
        stored = json.loads(_description(library).read_text())
        entries = (stored, stored.pop("replaced", None))
        digest = _digest(library)
        return next((entry for entry in entries if entry is not None and entry["digest"] == digest), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_description(description: Path) -> bool:
    try:
        stored = json.loads(description.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and {"format", "digest", "triple"} <= stored.keys()


def _linked_by(triple: str, command: str) -> Any:
    """TVM's linking function: the default function for this system; for another system, a function that calls that
    system's compiler."""
    from tvm.support import cc

    return cc.cross_compiler(command, options=["-lm"]) if compiler(triple) != "cc" else None


def is_compiled(model: ModelSource) -> bool:
    """Whether a model is, by its name, a library that `TvmModel.save` wrote."""
    return not isinstance(model, bytes) and Path(model).suffix == SUFFIX


def load_compiled(path: ModelSource, *, threads: int | None = None) -> TvmModel:
    """Load a library that `TvmModel.save` wrote.

    Raises BackendError if it is missing, damaged or written by another program.
    """
    assert not isinstance(path, bytes)
    file = Path(path)
    for needed in (file, _description(file)):
        if not needed.is_file():
            raise BackendError(f"{needed}: there is no such file")
    try:
        described = _described(file)
        stored = described or json.loads(_description(file).read_text())
        if stored["format"] != _VERSION:
            raise BackendError(f"{_description(file)}: written by another version: compile the model again")
        interface = Interface(
            inputs=tuple(Value(v["name"], v["dtype"], tuple(v["shape"])) for v in stored["inputs"]),
            outputs=tuple(stored["outputs"]),
            triple=str(stored["triple"]),
            cpu=str(stored["cpu"]),
            version=str(stored["version"]),
            checks=checks_from(stored["checks"]),
        )
    except OSError as error:
        raise BackendError(f"{file}: cannot be read: {error.strerror or one_line(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BackendError(f"{_description(file)}: damaged: compile the model again") from error
    package = tvm()
    if interface.version != package.__version__:
        raise BackendError(
            f"{file}: compiled with TVM {interface.version}, this is {package.__version__}: compile the model again"
        )
    if described is None:  # the system's loader may crash on a truncated library
        raise BackendError(
            f"{file}: damaged, or not what {_description(file).name} describes: compile the model again"
        )
    check_runs_here(interface, f"{file}: ")  # before loading, which may run initialisers of kernels
    return TvmModel(_loaded(file), interface, threads or default_threads())


def _loaded(file: Path) -> Any:
    """The code of a library. Raises BackendError."""
    import tvm_ffi

    try:
        # The library is loaded under a unique name: if the file of a library was replaced, the system's loader would
        # return the old library of the same name. (`tvm.runtime.load_module` would resolve the link.)
        with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder, _silent():
            name = Path(folder) / file.name
            name.symlink_to(file.resolve())
            return tvm_ffi.load_module(str(name))
    except Exception as error:  # the loader's exceptions have no common base
        raise BackendError(f"{file}: cannot be loaded: {one_line(error)}") from error


def _digest(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress standard error: TVM writes a warning to it for every constant that it saves or loads."""
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _description(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def interface_of(module: Any, model: Any, machine: Machine) -> Interface:
    """The interface of an ONNX ModelProto, with the shapes in its Relax `module`."""
    constants = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in constants]
    values = []
    for name, parameter in zip(names, module["main"].params, strict=True):
        shape = tuple(int(extent) for extent in parameter.ty.shape)
        values.append(Value(name, str(parameter.ty.dtype), shape))
    outputs = tuple(value.name for value in model.graph.output)
    return Interface(
        tuple(values), outputs, machine.triple, machine.cpu, str(tvm().__version__), checks_of(module)
    )


def check_runs_here(interface: Interface, what: str = "") -> None:
    """Raise BackendError if the model's code has instructions that this machine lacks, since running it would crash."""
    missing = lacking(interface.triple, interface.cpu)
    if missing:
        raise BackendError(
            f"{what}compiled for {interface.cpu}, and this machine has no {', '.join(missing)}: it cannot run here"
        )


def arguments_of(interface: Interface, feeds: Feeds) -> list[Array]:
    """The inputs in the interface's order. Raises BackendError for missing inputs, and for other shapes or types."""
    arrays = []
    for value in interface.inputs:
        if value.name not in feeds:
            raise BackendError(f"input {value.name} is missing")
        array = np.asarray(feeds[value.name])
        if array.shape != value.shape or array.dtype != np.dtype(value.dtype):
            raise BackendError(
                f"input {value.name} was compiled as {value.dtype}{list(value.shape)}, "
                f"not {array.dtype}{list(array.shape)}: compile the model for this size with --shape"
            )
        arrays.append(array)
    return arrays


_configured: dict[str, int] = {}


def _use_threads(count: int) -> None:
    """Set the number of threads of TVM's pool. A process has one pool.

    Raises BackendError in a process that was forked from one with a pool: the threads of the pool do not exist in the
    forked process, and a kernel would wait for them forever.
    """
    if _configured.setdefault("process", os.getpid()) != os.getpid():
        raise BackendError(
            "TVM cannot run in this process, which was forked from one where it ran: start a new one instead "
            '(multiprocessing.get_context("spawn"))'
        )
    if _configured.get("threads") != count:
        tvm().get_global_func("runtime.config_threadpool")(1, count)
        _configured["threads"] = count


def compiled(
    model: Any,
    machine: Machine,
    *,
    threads: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    algorithms: Algorithms = DEFAULT,
) -> TvmModel:
    """Compile an ONNX ModelProto for `machine`. `algorithms`: the algorithms that layers may use.

    Raises BackendError for models that cannot be lowered (see `importer.import_model`).
    """
    from xrlflow.backends.tvm.fusion.fuse import fuse
    from xrlflow.backends.tvm.fusion.layers import chosen_in
    from xrlflow.backends.tvm.lowering.executable import compile_module, schedule_all
    from xrlflow.backends.tvm.lowering.importer import import_model

    module = import_model(model, shapes)
    interface = interface_of(module, model, machine)
    fused = fuse(module, machine, algorithms=algorithms)
    chosen = chosen_in(fused)
    executable = compile_module(schedule_all(fused, machine), machine)
    return TvmModel(executable, interface, threads or machine.cores, chosen)
