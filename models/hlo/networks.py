"""The functions that build the networks, by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from models.hlo import Benchmark, Family, Kind
from models.hlo.convolutional import resnet, unet
from models.hlo.layers import Source
from models.hlo.sequential import lstm, mlp
from models.hlo.training import Network, Program, inference, training
from models.hlo.transformers import bert, gpt2, vit

NETWORKS: Mapping[Family, Callable[[Benchmark, Source], Network]] = MappingProxyType(
    {
        Family.GPT2: gpt2,
        Family.BERT: bert,
        Family.RESNET: resnet,
        Family.MLP: mlp,
        Family.VIT: vit,
        Family.LSTM: lstm,
        Family.UNET: unet,
    }
)


def program(benchmark: Benchmark, rng: np.random.Generator | None) -> Program:
    """The benchmark's function and its arguments: random arrays, or, without `rng`, only shapes and types."""
    source = Source(rng)
    network = NETWORKS[benchmark.family](benchmark, source)
    return training(network, source) if benchmark.kind is Kind.TRAINING else inference(network)
