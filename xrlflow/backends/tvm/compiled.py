"""A compiled model: run it, time it, save it as a shared library, load it again without anything that tunes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow import files
from xrlflow.backends.placement import default_threads
from xrlflow.backends.protocol import Array, BackendError, Feeds, ModelSource, one_line, same_feeds
from xrlflow.backends.tvm.bounds import Check, checks_from, checks_of, complain
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.target import Machine, compiler, lacking, linker

if TYPE_CHECKING:
    from typing_extensions import Self

SUFFIX = ".so"
_VERSION = 3


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output as the compiled model takes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interface:
    """What a compiled model was made for. With `checks` it has one output more than names: what they look at."""

    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    triple: str
    cpu: str
    version: str
    checks: tuple[Check, ...] = ()

    def results(self, values: Sequence[Array]) -> list[Array]:
        """The outputs, of all that the model has computed. Raises BackendError for an index outside its table."""
        if not self.checks:
            return list(values)
        complain(self.checks, values[-1])
        return list(values[:-1])


class TvmModel:
    """A model compiled for fixed sizes, in this process. See `CompiledModel`."""

    def __init__(self, executable: Any, interface: Interface, threads: int) -> None:
        self._executable: Any = executable
        self._machine: Any = None
        self.interface = interface
        self.threads = threads

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.interface.inputs)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input that it was compiled for."""
        return {value.name: value.shape for value in self.interface.inputs}

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.interface.outputs

    def run(self, feeds: Feeds) -> Sequence[Any]:
        """The outputs, in the order of `output_names`.

        Raises BackendError for inputs of other sizes or types, and for indices outside of their tables.
        """
        return self._call(self._arguments(feeds))

    def caller(self, feeds: Feeds) -> Callable[[], object]:
        """A call that runs the model once on `feeds`, arrays in and arrays out, as a user's program would."""
        arrays = same_feeds(feeds)
        self.run(arrays)
        return lambda: self._call(self._arguments(arrays))

    def bound_caller(self, feeds: Feeds) -> Callable[[], object]:
        """Like `caller`, with inputs and outputs that stay TVM's: for operators timed alone."""
        arguments = self._arguments(same_feeds(feeds))
        self._call(arguments)
        main = self._started()["main"]
        return lambda: main(*arguments)

    def close(self) -> None:
        """Drop the code, the weights and the memory plan."""
        self._machine = self._executable = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arguments(self, feeds: Feeds) -> list[Any]:
        tensor = tvm().runtime.tensor
        return [tensor(array, tvm().cpu()) for array in arguments_of(self.interface, feeds)]

    def _started(self) -> Any:
        """The code, loaded. Not before it is called: it may be for a processor that is not this one."""
        if self._executable is None:
            raise BackendError("this model has been closed")
        if self._machine is None:
            check_runs_here(self.interface)
            from tvm import relax

            self._machine = relax.VirtualMachine(self._executable, tvm().cpu())
        return self._machine

    def _call(self, arguments: Sequence[Any]) -> list[Any]:
        machine = self._started()
        _use_threads(self.threads)
        result = machine["main"](*arguments)
        values = [result] if hasattr(result, "numpy") else list(result)
        return self.interface.results([value.numpy() for value in values])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as one shared library with its weights, and its interface beside it (`.json`), whole or not.

        What is beside it describes the library that it replaces, too: a process may end between the two. Raises
        BackendError if there is no linker (a C compiler), if that fails, or if a file cannot be written.
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
            beside = _description(target)
            if beside.exists() and not target.exists() and not _is_ours(beside):
                raise BackendError(
                    f"{beside}: xrlflow did not write this: choose another name for {target.name}"
                )
            with tempfile.TemporaryDirectory(prefix=files.UNFINISHED, dir=target.parent) as folder:
                library, description = Path(folder) / target.name, Path(folder) / "interface.json"
                with _silent():
                    self._executable.export_library(
                        str(library), fcompile=_linked_by(self.interface.triple, link)
                    )
                stored = {"format": _VERSION, "digest": _digest(library), **asdict(self.interface)}
                if target.is_file() and beside.is_file():
                    stored["replaced"] = _described(target)
                description.write_text(json.dumps(stored, indent=1))
                files.put(description, beside)
                files.put(library, target)
        except OSError as error:
            raise BackendError(f"{target}: cannot be written: {error.strerror or one_line(error)}") from error
        except RuntimeError as error:  # TVM's, with what the linker said
            raise BackendError(f"{target}: cannot be built: {one_line(error)}") from error


def _described(library: Path) -> dict[str, Any] | None:
    """What is beside a library, of the library that is there (see `save`); None where it is damaged."""
    try:
        stored = json.loads(_description(library).read_text())
        found = (stored, stored.pop("replaced", None))
        digest = _digest(library)
        return next((entry for entry in found if entry is not None and entry["digest"] == digest), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_ours(description: Path) -> bool:
    try:
        stored = json.loads(description.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and {"format", "digest", "triple"} <= stored.keys()


def _linked_by(triple: str, command: str) -> Any:
    """How TVM links: in its own way here, otherwise with the compiler of that system."""
    from tvm.support import cc

    return cc.cross_compiler(command, options=["-lm"]) if compiler(triple) != "cc" else None


def is_compiled(model: ModelSource) -> bool:
    """Whether a model is a shared library that `TvmModel.save` wrote, by its name."""
    return not isinstance(model, bytes) and Path(model).suffix == SUFFIX


def load_compiled(path: ModelSource, *, threads: int | None = None) -> TvmModel:
    """Load what `TvmModel.save` wrote. Raises BackendError for a missing, damaged or foreign file."""
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
    import tvm_ffi

    if interface.version != package.__version__:
        raise BackendError(
            f"{file}: compiled with TVM {interface.version}, this is {package.__version__}: compile the model again"
        )
    if described is None:  # the system's loader may end the process on a truncated library
        raise BackendError(
            f"{file}: damaged, or not what {_description(file).name} describes: compile the model again"
        )
    check_runs_here(interface, f"{file}: ")  # loading alone may run what its kernels are initialised with
    try:
        # By a name of its own: the system's loader takes a file for the one of the same name that it has loaded before,
        # though it was replaced since. (`tvm.runtime.load_module` would resolve it.)
        with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder, _silent():
            name = Path(folder) / file.name
            name.symlink_to(file.resolve())
            executable = tvm_ffi.load_module(str(name))
    except Exception as error:  # the loader's own classes have no common base
        raise BackendError(f"{file}: cannot be loaded: {one_line(error)}") from error
    return TvmModel(executable, interface, threads or default_threads())


def _digest(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without standard error: TVM writes a warning there for every constant that it saves or loads."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _description(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def interface_of(module: Any, model: Any, machine: Machine) -> Interface:
    """The names of an ONNX ModelProto's inputs and outputs, with the sizes that its Relax `module` has."""
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
    """Raise BackendError for a model whose code would end the process: its instructions are not this machine's."""
    missing = lacking(interface.triple, interface.cpu)
    if missing:
        raise BackendError(
            f"{what}compiled for {interface.cpu}, and this machine has no {', '.join(missing)}: it cannot run here"
        )


def arguments_of(interface: Interface, feeds: Feeds) -> list[Array]:
    """The inputs in the order of the interface. Raises BackendError for inputs of other sizes or types."""
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
    """TVM has one pool of threads in a process."""
    if _configured.get("threads") != count:
        tvm().get_global_func("runtime.config_threadpool")(1, count)
        _configured["threads"] = count


def compiled(
    model: Any,
    machine: Machine,
    *,
    threads: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    tuned: Callable[[Any], Any | None] | None = None,
) -> TvmModel:
    """Compile an ONNX ModelProto for `machine`; `tuned` says how a function was tuned to run (see `lower`).

    Raises BackendError for what cannot be lowered (see `lower.import_model`).
    """
    from xrlflow.backends.tvm import lower

    module = lower.import_model(model, shapes)
    interface = interface_of(module, model, machine)
    scheduled = lower.schedule_all(lower.fuse(module, machine), machine, tuned)
    executable = lower.compile_module(scheduled, machine)
    return TvmModel(executable, interface, threads or machine.cores)
