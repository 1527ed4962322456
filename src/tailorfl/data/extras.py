"""Imports the packages that come with an extra only where they are needed."""

import importlib
from typing import Any

from tailorfl.errors import UserError


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """The module, or a line that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(
            f"{purpose} needs the package {package}, which is missing: install tailorfl[{extra}]"
        ) from error
