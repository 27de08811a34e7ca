"""The last passes before kernels are scheduled, for a whole model and for a layer alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xrlflow.backends.tvm.fusion.batches import fuse_batches
from xrlflow.backends.tvm.fusion.chains import cut_chains
from xrlflow.backends.tvm.fusion.open_sizes import sized
from xrlflow.backends.tvm.fusion.padding import pad_to_tiles
from xrlflow.backends.tvm.fusion.slices import separate
from xrlflow.backends.tvm.kernels.legalize import legalizations
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine


def last_passes(machine: Machine) -> list[Callable[[Any], Any]]:
    """What makes primitive functions of the operators of "main", and fuses them."""
    tvm()
    from tvm import relax

    return [
        lambda module: fuse_batches(module, machine),
        lambda module: pad_to_tiles(module, machine),
        separate,
        relax.transform.LegalizeOps(dict(legalizations(machine))),
        sized,
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        cut_chains,
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
        relax.transform.AttachAttrLayoutFreeBuffers(),
    ]
