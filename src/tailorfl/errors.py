"""The one error that a user can cause: what is wrong and what is allowed, in a line."""


class UserError(Exception):
    """Bad input. The command prints the message as one line and exits with status 2."""


def in_a_line(error: OSError) -> str:
    """What the machine refuses, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
