"""What several tests of studies need."""

from functools import partial
from pathlib import Path

import pytest
from study_runs import Said, Tailor, command, processes

from tailorfl.study import workers


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tailor:
    """``tailor compare``, ``sweep`` or ``reproduce`` in an empty folder without data: status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TAILOR_DATA", raising=False)

    def run(name: str, *arguments: str) -> Said:
        capsys.readouterr()
        status = command(list(arguments), monkeypatch, name)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def tailor(study: Tailor) -> Tailor:
    """``tailor reproduce``."""
    return partial(study, "reproduce")


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes for cells that start with what they import at hand."""
    monkeypatch.setattr(workers, "SPAWN", processes)
