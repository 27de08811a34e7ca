"""What `layer_times` measures: part of a model that can be computed in several ways, with the kernels of each."""

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


class KernelChoice(Hashable, Protocol):
    """How something is computed. Ways of one `group` differ in blocking only."""

    @property
    def group(self) -> Hashable: ...

    @property
    def text(self) -> str:
        """As it is stored: JSON."""
        ...


W = TypeVar("W", bound=KernelChoice)


def workload_key(kind: str, workload: object, far: bool) -> str:
    """A `Measurable.key`. It does not depend on the name of the form's class: in keys of stores they are all `Form`."""
    text = json.dumps([f"Form({repr(workload).partition('(')[2]}", far])
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


class Measurable(Protocol[W]):
    """`far`: its weights come from memory. `key`: equal, in every process, for what has equal times. Measurements are
    stored under it. `work`: multiplications of all calls in the model."""

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
        """What its times depend on besides the way, as many numbers for all layers."""
        ...

    def needed(self, machine: Machine) -> Sequence[Hashable]:
        """The groups without which times are not used. A kernel of the first one must have run."""
        ...

    def at(self, far: bool) -> Measurable[W]:
        """The same with weights from memory, or not."""
        ...

    def untuned(self, machine: Machine) -> Sequence[W]:
        """The kernels of each group in an untuned compilation."""
        ...

    def everything(self, machine: Machine) -> Sequence[W]:
        """All ways, each once."""
        ...

    def numbers(self, choice: W) -> Mapping[str, int]:
        """A way as numbers, of `space.KNOBS`."""
        ...

    def loops(self, choice: W) -> Sequence[Loop]:
        """The loops of a way's kernel (see `loops`); none where they are not known."""
        ...

    def weights(self, choice: W) -> int:
        """How many weights a way's kernel reads, as it keeps them."""
        ...

    def estimate(self, choice: W, machine: Machine) -> float:
        """The estimated time, in a unit of this layer."""
        ...

    def stored(self, text: str) -> W | None:
        """The way of a record; None if another version of the program wrote something else."""
        ...

    def is_current(self, choice: W, key: str, machine: Machine) -> bool:
        """Whether a stored way is still one to choose, and its kernel still the one that was measured."""
        ...

    def kernel(self, choice: W, machine: Machine) -> IRModule:
        """The kernel of a way, in a module of its own. Raises BackendError if it cannot be had alone."""
        ...

    def arguments(self, choice: W, machine: Machine) -> Sequence[Floats] | None:
        """What the kernel of a way reads; None if its results are not compared."""
        ...

    def expected(self, machine: Machine) -> Floats:
        """What its kernels must compute. Raises BackendError if it cannot run here."""
        ...


def key_of(subject: Measurable[W], choice: W, machine: Machine) -> str:
    """A key of the kernel's code."""
    return module_key(subject.kernel(choice, machine))
