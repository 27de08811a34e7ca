"""Broken models for the loader: `python -m tests.fuzz.loader --minutes 30 --jobs 2`.

Atheris mutates serialised models, byte by byte, field by field and node by node, guided by the lines of xrlflow that
they reach. Each is given to `xrlflow.onnxio.load`; models that load are written again, and then searched as by
`optimize --no-measure --no-verify --portable`, which is for files that one does not trust. The result must be a model
or an error of one line that a user can correct. Anything else (another exception, more than a few seconds or four
gigabytes, a crash) is saved as an .onnx file under --save, reported once for each place in the code, and makes the exit
code 1.

Models to start from: ONNX's backend tests, models of tests/fuzz/models.py, and some with functions, external data,
sparse tensors, strings, sequences and nested bodies.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_SECONDS = 20  # for one model
_BUDGET = 30  # graphs of one search
_MEGABYTES = 4096  # for the process, of which what libFuzzer keeps grows to 2048 in 20 minutes
_LARGEST = 20_000  # bytes of an initial model
_DATA = "data.bin"  # external data beside every model
_NUMBERED = (2, 7)  # attributes of integers
_OPERATORS = (
    "Add", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "Expand", "Flatten", "Gather", "Gemm",
    "LayerNormalization", "MatMul", "MaxPool", "Mul", "Pad", "Pow", "ReduceMean", "ReduceSum", "Relu", "Reshape",
    "Shape", "Slice", "Softmax", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
)  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 3, 7, 23, 127, 255, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 10**6, 10**12)


# --- initial models ---


def corpus() -> Iterator[tuple[str, bytes]]:
    """Names and serialised models."""
    from onnx.backend.test.loader import load_model_tests

    from tests.fuzz.models import idioms

    for kind in ("node", "simple", "pytorch-operator"):
        with warnings.catch_warnings():  # the tests are computed
            warnings.simplefilter("ignore")
            tests = load_model_tests(kind=kind)
        for test in tests:
            path = Path(test.model_dir or "") / "model.onnx"
            data = test.model.SerializeToString() if test.model is not None else b""
            if not data and path.is_file():
                data = path.read_bytes()
            if 0 < len(data) <= _LARGEST:
                yield test.name, data
    for seed in range(60):
        yield f"idioms{seed}", idioms(seed).proto.SerializeToString()
    for name, model in _others():
        yield name, model.SerializeToString()


_HEAD = '<ir_version: 10, opset_import: ["": 21, "local": 1]> '
_TEXTS = {
    "functions": (
        "agraph (float[N] x) => (float[N] y) { y = local.twice<k=2.0>(x) } "
        '<domain: "local", opset_import: ["": 21, "local": 1]> twice<k>(a) => (c) '
        "{ f = Constant<value_float: float = @k>() b = Mul(a, f) c = local.once(b) } "
        '<domain: "local", opset_import: ["": 21]> once(a) => (b) { b = Relu(a) }'
    ),
    "bodies": (
        "agraph (bool c, float[N,2] x, int64 m) => (float[] y) { "
        "a = If (c) <then_branch = t () => (float[] u) { u = Relu(x) }, "
        "else_branch = e () => (float[] u) { k = Constant<value_float=2.0>() w = Mul(x, k) "
        "u = If (c) <then_branch = t2 () => (float[] v) { v = Neg(w) }, "
        "else_branch = e2 () => (float[] v) { v = Abs(w) }> }> "
        "y = Loop (m, c, a) <body = b (int64 i, bool go, float[] s) => (bool go2, float[] s2) "
        "{ go2 = Identity(go) s2 = Add(s, x) }> }"
    ),
    "sequences": (
        "agraph (float[N] x, seq(float[N]) s) => (seq(float[N]) t, float[N] y) "
        "{ e = SequenceConstruct(x, x) i = Constant<value_int=0>() y = SequenceAt(e, i) t = SequenceInsert(s, y) }"
    ),
}


def _others() -> Iterator[tuple[str, Any]]:
    """Models with features that the others lack."""
    from onnx import helper, parser

    for name, text in _TEXTS.items():
        yield name, parser.parse_model(_HEAD + text)
    for graph in (_strings(), _weights(), _nibbles()):
        opset = helper.make_opsetid("", 21)
        yield graph.name, helper.make_model(graph, opset_imports=[opset], ir_version=10)


def _strings() -> Any:
    """A graph with a constant of strings."""
    from onnx import TensorProto, helper

    return helper.make_graph(
        [helper.make_node("StringConcat", ["x", "c"], ["y"])],
        "strings",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["N"])],
        [helper.make_tensor("c", TensorProto.STRING, [1], [b"a \xc3\xbc"])],
    )


def _weights() -> Any:
    """A graph with weights inside the file, in external data, and sparse ones."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.arange(6, dtype=np.float32), "w")
    external = numpy_helper.from_array(np.arange(6, dtype=np.float32), "e")
    onnx.external_data_helper.set_external_data(external, _DATA, 0, 24)
    external.ClearField("raw_data")
    external.data_location = TensorProto.EXTERNAL
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.asarray([1.0, 2.0], np.float32), "s"),
        numpy_helper.from_array(np.asarray([1, 4], np.int64), "s_indices"),
        [6],
    )
    return helper.make_graph(
        [
            helper.make_node("Add", ["x", "w"], ["a"]),
            helper.make_node("Mul", ["a", "e"], ["b"]),
            helper.make_node("Sub", ["b", "s"], ["y"]),
        ],
        "weights",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6])],
        [weights, external],
        sparse_initializer=[sparse],
    )


def _nibbles() -> Any:
    """A graph with a constant of four bits an element."""
    from onnx import TensorProto, helper

    table = helper.make_tensor("t", TensorProto.INT4, [3], [1, -2, 3])
    return helper.make_graph(
        [
            helper.make_node("Cast", ["t"], ["c"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["x", "c"], ["y"]),
        ],
        "nibbles",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        [table],
    )


# --- mutations ---


class Mutator:
    """Changes one or a few fields of a model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutate(self, data: bytes) -> bytes | None:
        """A changed model; None if the data is not a model, or if there is nothing to change."""
        import onnx
        from google.protobuf.message import DecodeError

        try:
            model = onnx.ModelProto.FromString(data)
        except DecodeError:
            return None
        for _ in range(self.random.choice((1, 1, 2, 4))):
            if self.random.random() < 0.5:
                # There may be nothing to choose from, a name may be no text, a number too large.
                with contextlib.suppress(IndexError, TypeError, ValueError):
                    self._node(model)
            else:
                self._once(model)
        return bytes(model.SerializeToString())

    def _node(self, model: Any) -> None:
        """Change one node of the graph, a body or a function, or the type of a value that it reads."""
        from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, helper

        messages = [model, *_inside(model)]
        nodes = [m for m in messages if isinstance(m, NodeProto)]
        if not nodes:
            return
        node, choose = self.random.choice(nodes), self.random.choice
        values = [v for n in nodes for v in (*n.input, *n.output)]
        kind = self.random.randrange(11)
        if kind == 0 and node.input:  # an operand less
            del node.input[self.random.randrange(len(node.input))]
        elif kind == 1 and node.input:
            node.input[self.random.randrange(len(node.input))] = ""
        elif kind == 2 and node.input:  # another operand, perhaps one that is made later: a cycle
            node.input[self.random.randrange(len(node.input))] = choose(values)
        elif kind == 3:
            node.input.append(choose(values))
        elif kind == 4 and node.output:  # a name twice
            node.output[self.random.randrange(len(node.output))] = choose(values)
        elif kind == 5 and (given := [a for a in node.attribute if a.type in _NUMBERED]):
            attribute = choose(given)
            numbers = [attribute.i] if attribute.type == AttributeProto.INT else list(attribute.ints)
            numbers.append(0)
            numbers[self.random.randrange(len(numbers))] += choose((-3, -2, -1, 1, 2, 3, 97))
            if attribute.type == AttributeProto.INT:
                attribute.i = numbers[0]
            else:
                attribute.ClearField("ints")
                attribute.ints.extend(numbers[: choose((-1, -1, -1, None))])
        elif kind == 6:  # an attribute more, often one that other nodes have
            found = [a for n in nodes for a in n.attribute]
            made = helper.make_attribute(
                choose(("axis", "strange", "keepdims", "to")), self.random.randrange(-3, 4)
            )
            copied = AttributeProto()
            copied.CopyFrom(choose([*found, made]))
            node.attribute.append(copied)
        elif kind == 7 and node.attribute:
            del node.attribute[self.random.randrange(len(node.attribute))]
        elif kind == 8:  # the operator of another node
            node.op_type = choose([n.op_type for n in nodes] + list(_OPERATORS))
        elif kind == 9 and (types := [m for m in messages if isinstance(m, TypeProto.Tensor)]):
            self._type(choose(types))
        elif tensors := [m for m in messages if isinstance(m, TensorProto)]:
            self._constant(choose(tensors))

    def _type(self, type: Any) -> None:
        """Another element type, or another size."""
        choose = self.random.choice
        if self.random.random() < 0.4 or not type.shape.dim:
            type.elem_type = choose((1, 6, 7, 9, 10, 11, 16))
        else:
            dims = type.shape.dim
            at = self.random.randrange(len(dims))
            what = self.random.randrange(4)
            if what == 0:
                del dims[at]
            elif what == 1:
                dims.add(dim_value=choose((1, 2, 3)))
            elif what == 2:
                dims[at].dim_param = choose(("N", "M"))
            else:
                dims[at].dim_value = choose((0, 1, 2, 3, 5, 64))

    def _constant(self, tensor: Any) -> None:
        """Other sizes, another element type or other numbers for a constant, whose data still fits."""
        import numpy as np
        from onnx import numpy_helper

        try:
            array = numpy_helper.to_array(tensor).copy()
        except Exception:  # the tensor was damaged before
            return
        if array.dtype.kind not in "fiub":
            return
        kind = self.random.randrange(4)
        if kind == 0:
            array = array.astype(self.random.choice(["f4", "f8", "i4", "i8", "u1", "?"]))
        elif kind == 1:
            array = array.reshape(self.random.choice([(-1,), (1, *array.shape), (*array.shape, 1)]))
        elif kind == 2:
            size = self.random.choice((0, 1, 2, 3))
            array = np.resize(array, (size, *array.shape[1:]))
        elif array.size:
            array.reshape(-1)[self.random.randrange(array.size)] = self.random.choice((0, 1, 2, 3, 99))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    def _once(self, model: Any) -> None:
        messages = [model, *_inside(model)]
        message = self.random.choice(messages)
        fields = (
            [f for f, _ in message.ListFields()]
            if self.random.random() < 0.7
            else list(message.DESCRIPTOR.fields)
        )
        if not fields:
            return
        field = self.random.choice(fields)
        if field.is_repeated:
            self._repeated(message, field, messages)
        elif field.message_type is not None:
            same = [m for m in messages if m.DESCRIPTOR is field.message_type]
            if same and self.random.random() < 0.7:
                copied = type(same[0])()
                copied.CopyFrom(self.random.choice(same))  # it may contain the message it is copied into
                getattr(message, field.name).CopyFrom(copied)
            else:
                message.ClearField(field.name)
        elif self.random.random() < 0.2:
            message.ClearField(field.name)
        else:
            self._set(message, field, messages)

    def _set(self, message: Any, field: Any, messages: Sequence[Any]) -> None:
        try:
            setattr(message, field.name, self._value(getattr(message, field.name), field, messages))
        except (TypeError, ValueError):  # the number is too large for the field
            message.ClearField(field.name)

    def _repeated(self, message: Any, field: Any, messages: Sequence[Any]) -> None:
        items = getattr(message, field.name)
        kind = self.random.randrange(4)
        if field.message_type is not None:
            if kind == 0 and len(items):
                del items[self.random.randrange(len(items))]
                return
            same = [m for m in messages if m.DESCRIPTOR is field.message_type]
            if same:
                copied = type(same[0])()
                copied.CopyFrom(self.random.choice(same))
                items.append(copied)
            return
        try:
            if kind == 0 and len(items):
                del items[self.random.randrange(len(items))]
            elif kind == 1 or not len(items):
                items.append(self._value(items[0] if len(items) else None, field, messages))
            else:
                at = self.random.randrange(len(items))
                items[at] = self._value(items[at], field, messages)
        except (TypeError, ValueError):
            del items[:]

    def _value(self, old: Any, field: Any, messages: Sequence[Any]) -> Any:
        if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return self.random.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 1e38, 0.5))
        if field.cpp_type != field.CPPTYPE_STRING:
            return self.random.choice((*_NUMBERS, (old or 0) + 1, (old or 0) - 1, self.random.randrange(30)))
        text = [
            self._text(messages),
            "",
            "a" * self.random.randrange(2000),
            "../../x",
            "/etc/hostname",
            "\x00",
            "ai.onnx",
        ]
        found = self.random.choice(text)
        if field.type != field.TYPE_BYTES:
            return found
        raw = old if isinstance(old, bytes) else b""
        name = (
            found if isinstance(found, bytes) else found.encode()
        )  # protobuf gives bytes if the text is not UTF-8
        return self.random.choice((name, b"\xff\xfe\xc3", raw[: len(raw) // 2], raw + b"\x00" * 7, raw[::-1]))

    def _text(self, messages: Sequence[Any]) -> str:
        """A name that the model has, or one of an operator or an attribute."""
        names = [n for m in messages for n in _names(m)]
        return self.random.choice(
            [*names, "Loop", "If", "Scan", "Constant", "Reshape", "ConstantOfShape", "value", "body"]
        )


def _inside(message: Any) -> Iterator[Any]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value if field.is_repeated else (value,):
            yield inner
            yield from _inside(inner)


def _names(message: Any) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.name in ("name", "op_type", "domain", "dim_param"):
            yield value
        elif field.name in ("input", "output") and field.message_type is None:
            yield from value


# --- a worker ---


class Loader:
    """Loads models, writes them again and searches. Models that neither work nor are refused in one line are saved."""

    def __init__(self, folder: Path, save: Path) -> None:
        self.path, self.save = folder / "model.onnx", save
        (folder / _DATA).write_bytes(b"\x00\x00\x80\x3f" * 64)
        self.seen: set[str] = set()
        self.count = self.loaded = 0

    def one(self, data: bytes) -> None:
        from xrlflow import api
        from xrlflow.onnxio import load, to_proto

        self.count += 1
        if self.count % 50 == 0:  # the process may end without notice
            print(f"RAN {self.count} {self.loaded}", flush=True)
        self.path.write_bytes(data)
        try:
            imported = load(str(self.path))
            to_proto(imported, imported.graph)
            self.loaded += 1
            api.optimize(
                str(self.path),
                search="greedy",
                budget=_BUDGET,
                portable=True,
                measure=False,
                verify=False,
                cost="roofline",
            )
        except api.VerificationFailed as error:  # nothing was to be verified
            self.keep(data, f"VerificationFailed: {error}", "VerificationFailed")
        except api.UserError as error:
            told = str(error)
            if "\n" in told.strip() or "bug of xrlflow" in told:
                self.keep(
                    data,
                    f"a message of several lines or of our own fault: {told[:200]!r}",
                    re.sub(r"\d+|'[^']*'", "", told[:60]),
                )
        except Exception as error:  # any other exception is a finding
            frames = traceback.extract_tb(error.__traceback__)
            place = next((f for f in reversed(frames) if "xrlflow" in f.filename), frames[-1])
            where = f"{Path(place.filename).name}:{place.lineno} {place.name}"
            self.keep(
                data,
                f"{type(error).__name__} at {where}: {str(error)[:200]}",
                f"{type(error).__name__} {where}",
            )

    def keep(self, data: bytes, what: str, kind: str) -> None:
        if kind in self.seen:
            return
        self.seen.add(kind)
        stem = "raised-" + hashlib.sha1(kind.encode()).hexdigest()[:10]
        if (self.save / f"{stem}.txt").exists():
            return
        self.save.mkdir(parents=True, exist_ok=True)
        (self.save / f"{stem}.onnx").write_bytes(data)
        (self.save / f"{stem}.txt").write_text(what)
        print(f"FOUND {stem}: {' '.join(what.split())}", flush=True)


def work(seconds: int, seed: int, save: Path, models: Path) -> None:
    """Fuzz in this process until the time is over or a model crashes it."""
    import atheris

    with atheris.instrument_imports(
        include=["xrlflow.onnxio", "xrlflow.ops.weights", "xrlflow.ops", "xrlflow.rewrite"]
    ):
        import xrlflow.api
        import xrlflow.onnxio
    assert xrlflow.onnxio.load is not None
    folder = tempfile.TemporaryDirectory(prefix="xrlflow-fuzz-")
    found = Path(folder.name) / "found"  # models that reach new lines are saved there, and mutated further
    found.mkdir()
    loader = Loader(Path(folder.name), save)

    def custom(data: bytes, size: int, seed: int) -> bytes:
        changed = Mutator(seed).mutate(data) if seed % 4 else None
        if changed is None or len(changed) > size:
            return bytes(atheris.Mutate(data, size))
        return changed

    options = [
        sys.argv[0], str(found), str(models), f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-timeout={_SECONDS}",
        f"-rss_limit_mb={_MEGABYTES}", f"-artifact_prefix={save}/", "-max_len=60000", "-verbosity=0", "-reload=0",
    ]  # fmt: skip
    save.mkdir(parents=True, exist_ok=True)
    atheris.Setup(options, loader.one, custom_mutator=custom)

    atheris.Fuzz()


# --- the run ---


def run(minutes: float, jobs: int, seed: int, save: Path) -> int:
    """Run workers until the time is over, and replace those that crash. Returns the number of findings."""
    end = time.monotonic() + 60 * minutes
    before = set(save.glob("*")) if save.is_dir() else set()
    ran = loaded = deaths = 0
    with tempfile.TemporaryDirectory(prefix="xrlflow-fuzz-") as folder:
        models = Path(folder)
        for name, data in corpus():
            (models / re.sub(r"\W", "_", name)[:80]).write_bytes(data)
        print(f"{len(list(models.iterdir()))} models to start from", flush=True)
        workers: list[tuple[subprocess.Popen[str], Any]] = []
        started = 0
        try:
            while time.monotonic() < end or workers:
                while len(workers) < jobs and (left := int(end - time.monotonic())) > 5:
                    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
                    command = [sys.executable, __file__, "--worker", str(left), "--seed", str(seed + started)]
                    command += ["--save", str(save), "--models", str(models)]
                    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
                    process = subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment
                    )
                    workers.append((process, log))
                    started += 1
                time.sleep(0.5)
                for worker in [w for w in workers if w[0].poll() is not None]:
                    workers.remove(worker)
                    process, log = worker
                    log.seek(0)
                    text = log.read()
                    found = re.findall(r"RAN (\d+) (\d+)", text)[-1:]
                    ran += sum(int(a) for a, _ in found)
                    loaded += sum(int(b) for _, b in found)
                    print(
                        *re.findall(r"^FOUND .*", text, re.MULTILINE),
                        sep="\n",
                        end="\n" if "FOUND" in text else "",
                    )
                    if process.returncode:
                        deaths += 1
                        lines = [line for line in text.splitlines() if "ERROR" in line or "SUMMARY" in line]
                        print(f"DIED with {process.returncode}: {' '.join(lines) or text[-300:]}", flush=True)
                if not workers and time.monotonic() >= end - 5:
                    break
        finally:
            for process, _ in workers:
                process.kill()
    made = sorted(set(save.glob("*")) - before) if save.is_dir() else []
    models_found = [p for p in made if p.suffix != ".txt"]
    print(
        f"{ran} models in {minutes:g} minutes by {jobs} processes, {loaded} of them loaded; "
        f"{len(models_found)} findings, {deaths} processes died"
    )
    for path in models_found:
        print(f"  {path}")
    return len(models_found) + (deaths if not models_found else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("out/fuzz-loader"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work(given.worker, given.seed, given.save, given.models)
        return 0
    return 1 if run(given.minutes, given.jobs, given.seed, given.save) else 0


if __name__ == "__main__":
    sys.exit(main())
