"""A picture of what a client's detector finds in its test images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailorfl.cohort import Cohort
from tailorfl.data.extras import picture
from tailorfl.detection.detections import detect
from tailorfl.errors import UserError
from tailorfl.study.export import Restored, one_client, read_run, restored
from tailorfl.study.palette import COLOURS

ACROSS = 4  # images in a row


def draw_detections(
    folder: Path, client: str, out: Path, images: int = 8, threshold: float = 0.5, data_dir: Path | None = None
) -> None:
    """Draw the objects that the model of a client finds in its first test images, and those that are there.

    What it finds with a probability above the threshold has a solid frame, with its class and probability; what is
    there is dashed.
    """
    config, names = read_run(folder)
    number = one_client(client, names, folder)
    run = restored(folder, config, data_dir)
    if not run.built.data.detection:
        raise UserError(
            f"{folder} has no objects to draw; allowed: a run on images with objects, or one that mixes layers"
        )
    [cohort] = run.served([number])
    rows = cohort.data.test.of(number)[:images]
    if not len(rows):
        raise UserError(f"client {client!r} has no test images to draw; allowed: another client")
    found = _found(run, cohort, len(rows), threshold)
    _draw(cohort, rows, found, f"{run.config.method_name}, client {client}, after round {run.round}", out)


def _found(run: Restored, cohort: Cohort, images: int, threshold: float) -> list[Tensor]:
    """In the first test images of a cohort of one."""
    batch = next(cohort.samples("test").in_order(images))
    with torch.no_grad():
        outputs = run.config.method.predict(cohort, batch)[0]
    return detect(outputs, cohort.network.anchors(), threshold=threshold)


def _draw(cohort: Cohort, rows: Tensor, found: Sequence[Tensor], title: str, out: Path) -> None:
    across = min(len(rows), ACROSS)
    down = -(-len(rows) // across)
    with picture(out, (3.2 * across, 3.2 * down + 0.4), dpi=120) as figure:
        grid = list(figure.subplots(down, across, squeeze=False).flat)
        for axes in grid:
            axes.set_axis_off()
        for axes, row, objects in zip(grid, rows.tolist(), found, strict=False):
            image = cohort.data.inputs[row].cpu()
            side = image.shape[-1]
            axes.imshow(image.permute(1, 2, 0).numpy().squeeze(), cmap="gray", extent=(0, side, side, 0))
            for kind, *box in cohort.data.targets[row, :, :5].tolist():
                if kind >= 0:
                    _frame(axes, box, side, color="white", linestyle="--", linewidth=1)
            for kind, score, *box in objects.flip(0).tolist():  # the best on top
                colour = COLOURS[int(kind) % len(COLOURS)]
                _frame(axes, box, side, color=colour, linewidth=2)
                label = f"{cohort.data.classes[int(kind)]} {score:.2f}"
                place = (box[0] * side, max(box[1] * side, 0.06 * side))
                axes.text(*place, label, color="white", fontsize=8, va="bottom", bbox={"fc": colour, "lw": 0, "pad": 1})
            axes.set(xlim=(0, side), ylim=(side, 0))
        figure.suptitle(title, fontsize="medium")


def _frame(axes: Any, box: Sequence[float], side: int, **style: Any) -> None:
    x0, y0, x1, y1 = (side * number for number in box)
    axes.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], **style)
