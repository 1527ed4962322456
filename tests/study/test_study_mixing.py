"""What a run wrote down of mixed layers, read back and drawn."""

from pathlib import Path

import pytest
from study_runs import execute

from tailorfl.errors import UserError
from tailorfl.study.mixing import degrees, draw_mixing, frozen_layers, has_mixing, read_notes


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "run"
    execute(folder, "pmixfed", clients_per_round=5, rounds=3, mix="fixed", mu=0.25)
    return folder


def test_degrees_are_read_back_by_layer_and_round(mixed: Path) -> None:
    rounds, down = degrees(read_notes(mixed), "2", "down")
    assert rounds == [1, 2, 3]
    assert down.tolist() == [[1, 0.25, 0.25], [1, 0, 0]]
    assert degrees(read_notes(mixed), "2", "up")[1].tolist() == [[0.75] * 3, [0.5] * 3]


def test_frozen_layers_are_those_with_nothing_global(mixed: Path) -> None:
    assert frozen_layers(read_notes(mixed)) == {1: 0, 2: 1, 3: 1}


def test_mixing_is_drawn(mixed: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    draw_mixing(mixed, "2", tmp_path / "picture.png")
    assert image.imread(tmp_path / "picture.png").std() > 0


@pytest.mark.parametrize("rule", ["sigmoid", "gradual", "random", "phases"])
def test_every_rule_has_a_picture(rule: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.image")
    execute(tmp_path / "run", "pmixfed", clients_per_round=5, rounds=2, mix=rule)
    draw_mixing(tmp_path / "run", "0", tmp_path / "picture.png")


def test_who_is_not_there_is_not_drawn(mixed: Path, tmp_path: Path) -> None:
    for client, said in (("9", "no client '9'"), ("all", "of one client")):
        with pytest.raises(UserError, match=said):
            draw_mixing(mixed, client, tmp_path / "picture.png")
    execute(tmp_path / "few", "pmixfed", clients_per_round=1, rounds=1)
    absent = next(name for name in "01234" if name not in next(iter(read_notes(tmp_path / "few").values())))
    with pytest.raises(UserError, match="took part in no round"):
        draw_mixing(tmp_path / "few", absent, tmp_path / "picture.png")


def test_other_runs_have_no_mixing(tmp_path: Path) -> None:
    execute(tmp_path / "run", "fedavg")
    assert not has_mixing(read_notes(tmp_path / "run"))
