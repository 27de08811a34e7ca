"""The programs for XLA are what they claim to be: they parse, compute what jax computes, train, and do not vary."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.extend
import numpy as np
import pytest
from jaxlib import _hlo, _jax

import models
from models import hlo
from models.__main__ import main
from models.hlo import Benchmark, Family, Kind, Variant
from models.hlo.layers import Source, dropout
from models.hlo.training import adam_state
from tests.levels import whole

pytestmark = pytest.mark.process

TRAINING, INFERENCE = Kind.TRAINING, Kind.INFERENCE
ROOT = Path(__file__).parents[2]

# Small programs of several families; jax takes seconds to run one without compiling it as a whole.
SMALL = [
    Benchmark(Family.GPT2, 1, INFERENCE, width=32, variant=Variant.DECODE),
    Benchmark(Family.BERT, 1, INFERENCE, width=32),
    Benchmark(Family.RESNET, 2, INFERENCE, width=8),
    Benchmark(Family.RESNET, 2, INFERENCE, width=8, variant=Variant.BOTTLENECK),
    Benchmark(Family.MLP, 2, TRAINING, width=16),
    Benchmark(Family.LSTM, 1, INFERENCE, width=32),
    Benchmark(Family.UNET, 3, INFERENCE, width=32),
]
TRAINED = [
    Benchmark(Family.GPT2, 1, TRAINING, width=32, variant=Variant.DROPOUT),
    Benchmark(Family.BERT, 1, TRAINING, width=32),
    Benchmark(Family.RESNET, 2, TRAINING, width=8),
    Benchmark(Family.MLP, 3, TRAINING, width=32),
    Benchmark(Family.VIT, 1, TRAINING, width=32),
    Benchmark(Family.LSTM, 1, TRAINING, width=32),
    Benchmark(Family.UNET, 3, TRAINING, width=8),
]
QUICK = {"xla_backend_optimization_level": "0"}  # LLVM takes most of the time of compiling


def named(benchmark: Benchmark) -> str:
    return benchmark.name


def computation(text: str) -> Any:
    return _hlo.XlaComputation(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def execute(text: str, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The outputs of an HLO text on the CPU."""
    module = _jax.mlir.hlo_to_stablehlo(computation(text).as_serialized_hlo_module_proto())
    backend = jax.extend.backend.get_backend("cpu")
    options = _jax.CompileOptions()
    options.env_option_overrides = [("xla_backend_optimization_level", 0)]
    executable = backend.compile_and_load(module, tuple(backend.local_devices()[:1]), options)
    return [np.asarray(output) for output in executable.execute([jax.device_put(x) for x in inputs])]


def test_there_are_thirty_programs_and_ten_are_held_out() -> None:
    assert len(hlo.BENCHMARKS) == 30
    assert all(name == benchmark.name for name, benchmark in hlo.BENCHMARKS.items())
    used = Counter((each.family.value, each.kind.value) for each in hlo.BENCHMARKS.values())
    assert used == {
        ("gpt2", "training"): 4,
        ("gpt2", "inference"): 3,
        ("bert", "training"): 3,
        ("bert", "inference"): 2,
        ("resnet", "training"): 3,
        ("resnet", "inference"): 2,
        ("mlp", "training"): 2,
        ("mlp", "inference"): 1,
        ("vit", "training"): 2,
        ("vit", "inference"): 2,
        ("lstm", "training"): 2,
        ("lstm", "inference"): 1,
        ("unet", "training"): 2,
        ("unet", "inference"): 1,
    }
    held_out = Counter(each.family.value for each in hlo.BENCHMARKS.values() if each.held_out)
    assert held_out == {"vit": 4, "lstm": 3, "unet": 3}
    assert {each.layers for each in hlo.BENCHMARKS.values()} <= set(range(2, 13))


@pytest.mark.parametrize("benchmark", whole(SMALL, SMALL[4:6]), ids=named)
def test_the_text_computes_what_the_function_does(benchmark: Benchmark) -> None:
    outputs = execute(benchmark.text(), benchmark.inputs(seed=1))
    program = benchmark.program(np.random.default_rng(1))
    expected = jax.tree.leaves(program.function(*program.arguments))
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected):
        assert output.dtype == wanted.dtype
        assert np.isfinite(output).all()
        np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("benchmark", whole(TRAINED, TRAINED[3:4]), ids=named)
def test_training_steps_lower_the_loss(benchmark: Benchmark) -> None:
    program = benchmark.program(np.random.default_rng(0))
    weights, state, _, *batch = program.arguments
    optimizer = jax.tree.map(np.zeros_like, adam_state(Source(np.random.default_rng(0)), weights))
    step = jax.jit(program.function).lower(weights, state, optimizer, *batch).compile(QUICK)
    start, losses = weights, []
    for _ in range(4):
        loss, weights, state, optimizer = step(weights, state, optimizer, *batch)
        losses.append(float(loss))
    assert all(after < before for before, after in pairwise(losses)), losses
    assert optimizer["count"] == 4
    # No weight is without a gradient.
    same = jax.tree.map(lambda one, other: bool((one == other).all()), start, weights)
    assert not any(jax.tree.leaves(same))


def test_dropout_drops_a_tenth_and_keeps_the_mean() -> None:
    """That GPT-2's and BERT's steps read their key is part of the test of the inputs below."""
    ones = np.ones((64, 256), np.float32)
    dropped = np.asarray(dropout(np.array([0, 1], np.uint32), ones))
    assert set(np.unique(dropped)) == {0, np.float32(1 / 0.9)}
    assert abs((dropped == 0).mean() - 0.1) < 0.01
    assert (dropped != np.asarray(dropout(np.array([0, 2], np.uint32), ones))).any()
    assert dropout(None, ones) is ones


@pytest.mark.whole
def test_decoding_token_by_token_gives_the_logits_of_the_sequence() -> None:
    """The cache of GPT-2 is right: two ways to the same logits."""
    whole = Benchmark(Family.GPT2, 2, INFERENCE, width=32).program(np.random.default_rng(0))
    decode = Benchmark(Family.GPT2, 2, INFERENCE, width=32, variant=Variant.DECODE).program(
        np.random.default_rng(1)
    )
    weights, state, tokens = whole.arguments
    cache = jax.tree.map(np.zeros_like, decode.arguments[-1])
    step = jax.jit(decode.function)
    for position in range(4):
        logits, cache = step(weights, state, tokens[:, position], np.int32(position), cache)
    expected = jax.jit(whole.function)(weights, state, tokens)[:, 3]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["gpt2-dropout-2-training", "bert-dropout-2-training", "lstm-2-training", "unet-5-inference"]
)
def test_inputs_are_those_of_the_entry_computation(name: str) -> None:
    shape = computation(hlo.text(name)).program_shape()
    wanted = [(each.numpy_dtype(), each.dimensions()) for each in shape.parameter_shapes()]
    assert [(array.dtype, array.shape) for array in hlo.inputs(name)] == wanted


def test_training_is_not_optimised_beforehand() -> None:
    """Adam's update of each weight is there, and passes find constants that are written again and again."""
    benchmark = hlo.find("mlp-3-training")
    text = benchmark.text()
    assert text.count(" sqrt(") == 6  # a kernel and a bias for each of three layers
    constants = [line.split(" = ")[1] for line in text.splitlines() if " constant(" in line]
    assert len(constants) > 2 * len(set(constants))
    assert hlo.operations(text) > 300


def test_operations_are_instructions_of_all_computations() -> None:
    text = hlo.text("lstm-4-inference")
    module = _hlo.hlo_module_from_text(text)
    counted = sum(len(each.instructions()) for each in module.computations())
    assert hlo.operations(text) == counted
    assert text.count(" while(") == 4


def test_stablehlo_is_the_same_module() -> None:
    text = hlo.stablehlo("mlp-6-inference")
    assert text.startswith("module @jit_infer")
    converted = _jax.mlir.mlir_module_to_xla_computation(text).get_hlo_module()
    lowered = _hlo.hlo_module_from_text(hlo.text("mlp-6-inference"))
    canonical = _hlo.HloPrintOptions.canonical()  # without the names of instructions
    assert converted.to_string(canonical) == lowered.to_string(canonical)


@pytest.mark.whole
def test_text_is_the_same_in_another_process() -> None:
    """Neither hashes of strings nor what was lowered before matter."""
    names = ["unet-5-inference", "lstm-2-training", "gpt2-dropout-2-training"]
    code = (
        "import sys, hashlib; from models import hlo\n"
        "for name in sys.argv[1:]: print(hashlib.sha256(hlo.text(name).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [hashlib.sha256(hlo.text(name).encode()).hexdigest() for name in names]


def test_without_jax_lowering_names_the_extra() -> None:
    """Importing and listing need no jax."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from models.__main__ import main\n"
        "assert main(['hlo']) == 0\n"
        "sys.exit(main(['hlo', 'bert-2-training', '-o', '/nowhere/out.hlo']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 31
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: bert-2-training is lowered by jax, which cannot be imported (")
    assert line.endswith("install it with `pip install 'xrlflow[xla]'`")


def test_command_writes_hlo_and_stablehlo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, text in (
        ("out.hlo", hlo.text("mlp-6-inference")),
        ("out.mlir", hlo.stablehlo("mlp-6-inference")),
    ):
        assert main(["hlo", "mlp-6-inference", "-o", str(tmp_path / file)]) == 0
        assert (tmp_path / file).read_text() == text
    assert f"{hlo.operations(hlo.text('mlp-6-inference'))} HLO operations" in capsys.readouterr().out


def test_what_there_is_not_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(models.ZooError, match="no program is called 'gpt3'; there are: gpt2-2-training, "):
        hlo.text("gpt3")
    with pytest.raises(models.ZooError, match="no variant dropout of gpt2 inference"):
        Benchmark(Family.GPT2, 2, INFERENCE, variant=Variant.DROPOUT)
    with pytest.raises(models.ZooError, match=r"unet-4-training: a UNet has .* an odd number"):
        Benchmark(Family.UNET, 4, TRAINING)
    with pytest.raises(models.ZooError, match="at least 1, not 0"):
        Benchmark(Family.MLP, 0, TRAINING)
    assert main(["hlo", "mlp-6-inference"]) == 2
    assert capsys.readouterr().err == (
        "error: give a file to write mlp-6-inference to: -o mlp-6-inference.hlo, or .mlir for StableHLO\n"
    )
