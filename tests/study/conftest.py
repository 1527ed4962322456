"""What several tests of studies need."""

from pathlib import Path

import pytest
from study_runs import Said, Tailor, command


@pytest.fixture
def tailor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tailor:
    """``tailor reproduce`` in an empty folder without data: status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TAILOR_DATA", raising=False)

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        status = command(list(arguments), monkeypatch)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run
