"""The zoo's networks through TVM."""

from __future__ import annotations

import warnings

import pytest

import models
import xrlflow
from models import ZOO
from tests.levels import whole

pytestmark = pytest.mark.measures


@pytest.mark.parametrize("name", whole(ZOO, ("bert", "mobilenetv2", "nasrnn", "squeezenet")))
def test_networks_compute_what_onnx_runtime_does(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a kernel was left unscheduled")
        result = xrlflow.optimize(
            models.small(name), backend="tvm", search="greedy", cost="roofline", measure=False, threads=2
        )
    assert result.report.verified
    assert result.compiled is not None
