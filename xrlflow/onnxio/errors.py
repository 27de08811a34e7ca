"""What goes wrong with models: one line that names the file and says what to do."""


class ModelError(ValueError):
    """A model that cannot be read, understood or written."""


class GrowthError(ModelError):
    """The result would be larger than the caller allows."""
