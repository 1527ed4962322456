"""What the server keeps beside a run: who takes part, and who has its model."""

import json
from dataclasses import dataclass
from pathlib import Path

from tailorfl.data.atomic import durable_file
from tailorfl.flower.outline import Site
from tailorfl.study.folder import FEDERATION

SITES, MODELS = "sites.json", "models.json"  # who takes part, and who has its model at the end


@dataclass
class Roll:
    """Who takes part, by which name the experiment is known to the sites, and how often the server was started."""

    experiment: str
    term: int
    sites: list[Site]

    @staticmethod
    def read(path: Path) -> "Roll":
        found = json.loads(path.read_text())
        return Roll(found["experiment"], found["term"], [Site.read(site) for site in found["sites"]])

    def write(self, path: Path) -> None:
        facts = {"experiment": self.experiment, "term": self.term, "sites": [site.facts() for site in self.sites]}
        with durable_file(path) as temporary:
            temporary.write_text(json.dumps(facts, indent=1) + "\n")


def handed_over(folder: Path) -> bool:
    """Whether every site of a run has its model."""
    path = folder / FEDERATION / SITES
    return path.is_file() and {site.name for site in Roll.read(path).sites} <= set(served(folder))


def served(folder: Path) -> list[str]:
    """The sites that have written their models."""
    note = folder / FEDERATION / MODELS
    found: list[str] = json.loads(note.read_text())["sites"] if note.is_file() else []
    return found
