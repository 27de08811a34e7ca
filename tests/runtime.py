"""What tests have to know of the ONNX Runtime at hand."""

from __future__ import annotations

import onnxruntime
import pytest
from packaging.version import Version

VERSION = Version(onnxruntime.__version__)
# Verification finds what an old ONNX Runtime computes otherwise: a rule or an evaluation that does not fit is undone.
recent = pytest.mark.skipif(
    Version("1.31") > VERSION, reason=f"ONNX Runtime {VERSION} lacks this, computes it otherwise, or crashes"
)
faulty = pytest.mark.skipif(Version("1.32") <= VERSION, reason="ONNX Runtime 1.32 does not have this fault")
