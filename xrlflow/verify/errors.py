"""Why two models cannot be compared. A comparison that finds a difference is a result, not an error."""

from __future__ import annotations


class VerificationError(ValueError):
    """Two models cannot be compared. The message is one line that says what to do."""


class InputsNeeded(VerificationError):
    """No inputs were found on which the original runs: the user has to give some (`--inputs`).

    `failure`: how the original failed on the first inputs that were drawn; "" if no inputs were drawn.
    """

    def __init__(self, message: str, failure: str = "") -> None:
        super().__init__(message + (f" (the first failure: {failure})" if failure else ""))
        self.failure = failure


class BadInputs(VerificationError):
    """The user's inputs do not fit the model."""


class OriginalFails(VerificationError):
    """ONNX Runtime cannot load or run the original."""
