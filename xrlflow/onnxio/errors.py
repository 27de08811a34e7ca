"""Errors about models. Each message is one line that names the file and says what to do."""

from xrlflow.common.text import printable, shortened

# The longest message, in characters. Longer ones are cut in the middle, because the end says what to do.
_LONGEST, _END = 2000, 400


class ModelError(ValueError):
    """A model cannot be read, understood or written.

    The message is one line. Characters that cannot be printed are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(printable(message), _LONGEST, _END))


class GrowthError(ModelError):
    """The result would be larger than the caller allows."""
