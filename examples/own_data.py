"""Your own data and your own network, from Python: hospitals that treat by different rules.

    python own_data.py [FOLDER]

Writes FOLDER/hospitals.csv (default: runs/own_data), trains two methods on it, and prints each hospital's accuracy.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from tailorfl.study.config import configure
from tailorfl.study.folder import CLIENTS
from tailorfl.study.run import Run

HOSPITALS = ("Ash", "Birch", "Cedar", "Elm", "Fir", "Oak")
PATIENTS = 120


class Net(nn.Module):
    """Any module will do. Its children are its layers, in this order; the last one is the head."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def write_table(path: Path) -> None:
    """All hospitals measure the same; each weighs pressure against glucose in its own way when it decides to treat."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "pressure", "glucose", "pulse", "treated"])
        for number, hospital in enumerate(HOSPITALS):
            angle = np.pi * number / len(HOSPITALS)
            for pressure, glucose, pulse in rng.normal(size=(PATIENTS, 3)).round(3):
                treated = np.cos(angle) * pressure + np.sin(angle) * glucose > 0
                table.writerow([hospital, pressure, glucose, pulse, "yes" if treated else "no"])


def accuracies(method: str, table: Path, folder: Path) -> dict[str, float]:
    """Train a method on the table; each hospital's accuracy on patients that it held out."""
    settings = {
        "data": f"csv:{table}",
        "client_column": "hospital",
        "network": "own_data:Net",
        "network_options": {"width": 32},
        "rounds": 30,
        "lr": 0.05,
    }
    Run(configure(method, settings), folder).execute(force=True)
    with (folder / CLIENTS).open() as file:
        return {row["client"]: float(row["accuracy"]) for row in csv.DictReader(file)}


def main(folder: Path) -> None:
    table = folder / "hospitals.csv"
    write_table(table)
    found = {method: accuracies(method, table, folder / method) for method in ("fedavg", "fedper")}
    print(f"{'hospital':10s}" + "".join(f"{method:>10s}" for method in found))
    for hospital in HOSPITALS:
        print(f"{hospital:10s}" + "".join(f"{100 * scores[hospital]:8.1f} %" for scores in found.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_data"))
