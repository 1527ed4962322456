"""Says in one line why something failed."""


def reason(error: Exception) -> str:
    """The first line of the error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(":")
