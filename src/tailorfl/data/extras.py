"""The packages that come with an extra are imported only where they are needed; and what they are needed for."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailorfl.data.atomic import whole_file
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


@contextmanager
def picture(path: Path, size: tuple[float, float], dpi: int = 150) -> Iterator[Any]:
    """A figure of so many inches to draw on; it is written as a PNG file when all is drawn."""
    purpose = "drawing a picture"
    figure = import_extra("matplotlib.figure", "plot", purpose).Figure(figsize=size, dpi=dpi, layout="constrained")
    import_extra("matplotlib.backends.backend_agg", "plot", purpose).FigureCanvasAgg(figure)
    yield figure
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png")
