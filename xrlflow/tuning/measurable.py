"""The interface of layers and of inverted residuals: parts of a model that several kernels can compute. `layer_times`
has their measured times."""

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
    """A kernel among all kernels that compute the same layer. Choices of one `group` differ in blocking only."""

    @property
    def group(self) -> Hashable: ...

    @property
    def text(self) -> str:
        """The choice as JSON text, in which it is stored."""
        ...


W = TypeVar("W", bound=Choice)


def workload_key(kind: str, workload: object, far: bool) -> str:
    """The key of a layer in stores (see `Measurable`). The key does not depend on the name of the workload's class: all
    keys are computed with the name `Form`."""
    text = json.dumps([f"Form({repr(workload).partition('(')[2]}", far])
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


class Measurable(Protocol[W]):
    """A part of a model that several kernels can compute. `far`: whether its weights come from memory, not from caches.
    `key`: the name under which measurements are stored. Parts with equal times have equal keys, in every process.
    `work`: the multiplications of all calls in the model."""

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
        """How often the model calls this part."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dimensions of the part, on which times depend besides the choice. All layers have the same number of
        them."""
        ...

    def needed(self, machine: Machine) -> Sequence[Hashable]:
        """The groups of choices that must have been measured. Otherwise measurements of this part are not used. At
        least one kernel of the first group must have run without an error."""
        ...

    def at(self, far: bool) -> Measurable[W]:
        """The same part with weights from memory (`far`) or from caches."""
        ...

    def untuned(self, machine: Machine) -> Sequence[W]:
        """The kernels that an untuned compilation uses, one of each group."""
        ...

    def everything(self, machine: Machine) -> Sequence[W]:
        """All choices, each once."""
        ...

    def numbers(self, choice: W) -> Mapping[str, int]:
        """The values of a choice's knobs, by the knobs' names in `space.KNOBS`."""
        ...

    def loops(self, choice: W) -> Sequence[Loop]:
        """The loops of the kernel of a choice (see `kernels.loops`); an empty sequence if the loops are not known."""
        ...

    def weights(self, choice: W) -> int:
        """The number of weights that the kernel of a choice reads, as they are packed."""
        ...

    def estimate(self, choice: W, machine: Machine) -> float:
        """The estimated time of a choice. Its unit may differ between layers."""
        ...

    def stored(self, text: str) -> W | None:
        """The choice that a stored text describes; None if another version of the program wrote a text that this
        version cannot read."""
        ...

    def is_current(self, choice: W, key: str, machine: Machine) -> bool:
        """Whether a stored choice still exists, and its kernel's code is still what was measured. `key`: the digest of
        the measured code."""
        ...

    def kernel(self, choice: W, machine: Machine) -> IRModule:
        """The kernel of a choice, in a module of its own. Raises BackendError if the choice has no kernel."""
        ...

    def arguments(self, choice: W, machine: Machine) -> Sequence[Floats] | None:
        """The arguments of the kernel of a choice; None if its results are not compared."""
        ...

    def expected(self, machine: Machine) -> Floats:
        """The expected results of all kernels. Raises BackendError if they cannot be computed here."""
        ...


def key_of(subject: Measurable[W], choice: W, machine: Machine) -> str:
    """A digest of the code of a choice's kernel."""
    return module_key(subject.kernel(choice, machine))
