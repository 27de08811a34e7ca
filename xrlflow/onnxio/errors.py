"""What goes wrong with models: one line that names the file and says what to do."""

from xrlflow.text import printable, shortened

# A message of more characters than that is cut in the middle: the end says what to do.
_LONGEST, _END = 2000, 400


class ModelError(ValueError):
    """A model that cannot be read, understood or written. The message is one line, whatever the file's names are: what
    cannot be printed is escaped."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(printable(message), _LONGEST, _END))


class GrowthError(ModelError):
    """The result would be larger than the caller allows."""
