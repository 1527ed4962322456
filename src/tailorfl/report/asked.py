"""What a comparison or a sweep was asked for, as it stored when it began, and what of it there is no run of."""

import logging

from tailorfl.errors import UserError
from tailorfl.report.results import Results
from tailorfl.report.runs import read_error
from tailorfl.study.cells import Failure
from tailorfl.study.compare import plan_comparison
from tailorfl.study.folder import ERROR, is_run
from tailorfl.study.grid import Grid
from tailorfl.study.sweep import plan_sweep

log = logging.getLogger(__name__)

NOT_BEGUN = "not begun"


def grid_of(results: Results) -> Grid | None:
    """All that was asked for; None where it is not known, or not by this version."""
    try:
        return _planned(results)
    except UserError:
        return None


def _planned(results: Results) -> Grid | None:
    asked = results.asked
    if results.folder is None or not asked:
        return None
    if "methods" in asked:
        lines, seeds = plan_comparison(asked["methods"], asked["settings"])
    else:
        lines, seeds = plan_sweep(asked["method"], asked["values"], asked["settings"])
    return Grid(results.folder, lines, seeds, asked=asked)


def not_measured(results: Results) -> list[str]:
    """A line for each reason, with what it kept from having a run."""
    try:
        grid = _planned(results)
    except UserError as error:
        log.warning("what was asked for is left out: %s", error)
        return []
    if grid is None:
        return []
    for cell, key in grid.cells.items():
        if not is_run(cell.folder):
            grid.failures[key] = Failure(read_error(cell.folder / ERROR) or NOT_BEGUN)
    return grid.failed()
