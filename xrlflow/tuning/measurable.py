"""The interface of layers and blocks: parts of a model with several kernels each, to be measured by `layer_times`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from xrlflow.backends.tvm.kernels.layer_kernels import Floats
from xrlflow.backends.tvm.kernels.loops import Loop
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.tasks import module_key

if TYPE_CHECKING:
    from tvm.ir import IRModule


class Choice(Hashable, Protocol):
    """A kernel among those that compute the same. Choices of one `group` differ in blocking only."""

    @property
    def group(self) -> Hashable: ...

    @property
    def text(self) -> str:
        """The choice as JSON, as stores have it."""
        ...


W = TypeVar("W", bound=Choice)


def workload_key(kind: str, workload: object, far: bool) -> str:
    """The key of a layer in stores (see `Measurable`). The name of the workload's class is not part of it: all keys say
    `Form`."""
    text = json.dumps([f"Form({repr(workload).partition('(')[2]}", far])
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


class Measurable(Protocol[W]):
    """A part of a model that has several kernels. `far`: its weights come from memory. `key`: a name under which
    measurements are stored; it is equal, in every process, for parts with equal times. `work`: the multiplications of
    all calls in the model."""

    @property
    def far(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def work(self) -> int: ...

    @property
    def weight(self) -> int:
        """How often the model calls it."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers on which its times depend besides the choice, as many for all layers."""
        ...

    def needed(self, machine: Machine) -> Sequence[Hashable]:
        """The groups that must have been measured; otherwise measurements are not used. A kernel of the first one must
        have run."""
        ...

    def at(self, far: bool) -> Measurable[W]:
        """The same part with weights from memory, or not."""
        ...

    def untuned(self, machine: Machine) -> Sequence[W]:
        """The kernel of each group in an untuned compilation."""
        ...

    def everything(self, machine: Machine) -> Sequence[W]:
        """All choices, each once."""
        ...

    def numbers(self, choice: W) -> Mapping[str, int]:
        """The knobs of a choice, by their names in `space.KNOBS`."""
        ...

    def loops(self, choice: W) -> Sequence[Loop]:
        """The loops of the kernel of a choice (see `kernels.loops`); none if they are not known."""
        ...

    def weights(self, choice: W) -> int:
        """The number of weights that the kernel of a choice reads, as they are packed."""
        ...

    def estimate(self, choice: W, machine: Machine) -> float:
        """The estimated time, in a unit of this layer."""
        ...

    def stored(self, text: str) -> W | None:
        """The choice of a record; None if another version of the program wrote something else."""
        ...

    def is_current(self, choice: W, key: str, machine: Machine) -> bool:
        """Whether a stored choice still exists, and its kernel is still the one that was measured."""
        ...

    def kernel(self, choice: W, machine: Machine) -> IRModule:
        """The kernel of a choice, in a module of its own. Raises BackendError if there is none."""
        ...

    def arguments(self, choice: W, machine: Machine) -> Sequence[Floats] | None:
        """The arguments of the kernel of a choice; None if its results are not compared."""
        ...

    def expected(self, machine: Machine) -> Floats:
        """The expected results of all kernels. Raises BackendError if they cannot be computed here."""
        ...


def key_of(subject: Measurable[W], choice: W, machine: Machine) -> str:
    """A digest of the kernel's code."""
    return module_key(subject.kernel(choice, machine))
