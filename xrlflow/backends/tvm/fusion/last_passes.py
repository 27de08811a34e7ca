"""The last passes before kernels are scheduled, for models and for single layers."""

from __future__ import annotations

from xrlflow.backends.tvm.fusion.batches import fuse_batches
from xrlflow.backends.tvm.fusion.chains import cut_chains
from xrlflow.backends.tvm.fusion.open_sizes import sized
from xrlflow.backends.tvm.fusion.padding import pad_to_tiles
from xrlflow.backends.tvm.fusion.passes import Pass
from xrlflow.backends.tvm.fusion.slices import separate
from xrlflow.backends.tvm.kernels.legalize import legalizations
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import folded


def last_passes(machine: Machine) -> list[Pass]:
    """A list of the passes that lower the operators of "main" to primitive functions, and then fuse these."""
    tvm()
    from tvm import relax

    return [
        Pass("batches", lambda module: fuse_batches(module, machine)),
        Pass("padding", lambda module: pad_to_tiles(module, machine)),
        Pass("separate_slices", separate),
        Pass("legalize", relax.transform.LegalizeOps(dict(legalizations(machine)))),
        Pass("sizes", sized),
        Pass("patterns", relax.transform.AnnotateTIROpPattern()),
        Pass("fold_constants", folded),
        Pass("cut_chains", cut_chains),
        Pass("fuse_operators", relax.transform.FuseOps()),
        Pass("fuse_loops", relax.transform.FuseTIR()),
        Pass("dead_code", relax.transform.DeadCodeElimination()),
        Pass("layout_free_weights", relax.transform.AttachAttrLayoutFreeBuffers()),
    ]
