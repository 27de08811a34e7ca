"""GridSample has the results of ONNX Runtime, also far outside of the image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.levels import whole
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

MODES = [
    f'mode="{mode}", padding_mode="{padding}", align_corners={corners}'
    for mode in ("linear", "nearest")
    for padding in ("zeros", "border", "reflection")
    for corners in (0, 1)
]


def grid(count: int, height: int, width: int, image: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Positions in and around an image. They include the centres and borders of pixels, and positions far away."""
    result = np.random.default_rng(0).uniform(-1.7, 1.7, (count, height * width, 2)).astype(np.float32)
    ties = [(np.arange(2 * n + 1) / n - 1).astype(np.float32) for n in reversed(image)]
    for axis, values in enumerate(ties):
        result[:, : len(values), axis] = values[: result.shape[1]]
    result[0, -3:] = [[1e4, -1e4], [-1e3, 0.1], [-5, 7]]  # those far away
    return result.reshape(count, height, width, 2)


def compare(shape: tuple[int, ...], places: tuple[int, int], modes: list[str], machine: Machine) -> None:
    """Compare modes for an image of this shape. Some of its elements are not finite."""
    (count, channels, *image), (height, width) = shape, places
    outputs = ", ".join(f"float[{count},{channels},{height},{width}] y{n}" for n in range(len(modes)))
    nodes = "\n ".join(f"y{n} = GridSample<{attributes}>(x, g)" for n, attributes in enumerate(modes))
    inputs = f"float[{','.join(map(str, shape))}] x, float[{count},{height},{width},2] g"
    model = network(f"({inputs}) => ({outputs}) {{ {nodes} }}")
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    spoiled, g = x.copy(), grid(count, height, width, (image[0], image[1]))
    spoiled[0, 0, 0, :2] = [np.inf, np.nan]
    with (
        open_model(model.SerializeToString(), threads=1) as runtime,
        compiled(model, machine, threads=2) as ours,
    ):
        for feeds in ({"x": x, "g": g}, {"x": spoiled, "g": g}):
            for a, b, attributes in zip(runtime.run(feeds), ours.run(feeds), modes, strict=True):
                np.testing.assert_allclose(b, a, rtol=2e-5, atol=4e-6, err_msg=attributes)
        g[0, 0, :3] = [[np.nan, 0], [np.inf, -np.inf], [3e38, -3e38]]  # no place: nothing is read outside
        ours.run({"x": x, "g": g})


@pytest.mark.parametrize(
    ("shape", "modes"),
    [
        ((2, 19, 5, 7), MODES[:6]),
        ((2, 19, 5, 7), MODES[6:]),
        ((1, 3, 8, 8), MODES[::5]),
        ((1, 1, 1, 6), MODES[:1]),
    ],
)
def test_agrees_with_onnx_runtime(shape: tuple[int, ...], modes: list[str]) -> None:
    compare(shape, (9, 11), modes, detect())


def test_fewer_places_than_channels() -> None:
    compare((1, 32, 3, 4), (1, 5), MODES[:1], detect())


@pytest.mark.parametrize("cpu", whole(["haswell", "nehalem"], ("haswell",)))
def test_narrower_machines(cpu: str) -> None:
    compare((1, 9, 5, 7), (9, 11), MODES[4:5], detect(cpu=cpu))


@pytest.mark.parametrize("mode", [*MODES[1::2], 'mode="cubic", padding_mode="border"', 'mode="cubic"'])
def test_places_that_cannot_be_counted(mode: str) -> None:
    """ONNX Runtime treats positions that no integer can hold as -1. Those that only TVM's integers cannot hold count as
    outside."""
    model = network(
        f"(float[1,5,4,4] x, float[1,2,9,2] g) => (float[1,5,2,9] y) {{ y = GridSample<{mode}>(x, g) }}"
    )
    x = np.random.default_rng(1).standard_normal((1, 5, 4, 4)).astype(np.float32)
    g = grid(1, 2, 9, (4, 4))
    g[0, 0, :5] = [[np.nan, 0], [np.inf, -np.inf], [3e38, -3e38], [0.3, 1e20], [np.nan, np.nan]]
    if "reflection" not in mode:  # what is reflected so often is rounded
        g[0, 1, :3] = [[3e9, 0.1], [0.2, -3e9], [3e9, 3e9]]
    with open_model(model.SerializeToString(), threads=1) as runtime, compiled(model, detect()) as ours:
        a, b = runtime.run({"x": x, "g": g})[0], ours.run({"x": x, "g": g})[0]
    np.testing.assert_allclose(b, a, rtol=2e-5, atol=4e-6)


def test_volumes_have_no_places_that_are_no_numbers() -> None:
    model = network(
        "(float[1,2,3,4,5] x, float[1,1,1,4,3] g) => (float[1,2,1,1,4] y)"
        ' { y = GridSample<mode="linear", padding_mode="border">(x, g) }'
    )
    x = np.random.default_rng(1).standard_normal((1, 2, 3, 4, 5)).astype(np.float32)
    g = np.array([[np.nan, 0, 0], [1e20, 0.1, -0.4], [0.1, np.inf, 0.3], [0.2, 0.4, -np.inf]], np.float32)
    feeds = {"x": x, "g": g.reshape(1, 1, 1, 4, 3)}
    with open_model(model.SerializeToString(), threads=1) as runtime, compiled(model, detect()) as ours:
        np.testing.assert_allclose(ours.run(feeds)[0], runtime.run(feeds)[0], rtol=2e-5, atol=4e-6)


def test_one_mirrored_row_is_refused_by_name() -> None:
    model = network(
        "(float[1,3,1,2] x, float[1,9,8,2] g) => (float[1,3,9,8] y)"
        ' { y = GridSample<padding_mode="reflection", align_corners=1>(x, g) }'
    )
    with pytest.raises(BackendError, match="one row or column"):
        import_model(model)
