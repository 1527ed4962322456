"""A site with data of its own: what it may be told, and what it tells."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flower_runs import grid_of, rounds_of, serve_on, small
from flwr.app import Context, Message
from inline_grid import InlineGrid, honest

from tailorfl.errors import UserError
from tailorfl.flower.node import SiteOptions, _loaded
from tailorfl.flower.records import facts_of, pack


def table(path: Path, seed: int, rows: int = 40, labels: tuple[str, ...] = ("ill", "well")) -> str:
    rng = np.random.default_rng(seed)
    lines = [f"{a:.3f},{b:.3f},{labels[int(a + b > 0) % len(labels)]}" for a, b in rng.normal(size=(rows, 2))]
    path.write_text("age,dose,state\n" + "\n".join(lines) + "\n")
    return f"csv:{path}"


def sites(tmp_path: Path, **settings: Any) -> InlineGrid:
    config = small("fedper", clients=None, local_epochs=1, **settings)
    grid = grid_of(config, tmp_path, nodes=3)
    names = ("clinic-b", "clinic-a", "clinic-c")
    grid.nodes = {
        20 + k: {"client": name, "data": table(tmp_path / f"{name}.csv", k, 40 + 8 * k), "state": str(tmp_path / name)}
        for k, name in enumerate(names)
    }
    return grid


def test_three_sites_with_files_of_their_own(tmp_path: Path) -> None:
    summary = serve_on(sites(tmp_path))
    assert summary is not None
    assert summary["personalized_accuracy"] > 0.6
    clients = (tmp_path / "flower" / "clients.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in clients] == ["client", "clinic-a", "clinic-b", "clinic-c"]
    assert clients[2].split(",")[2:5] == ["30", "0", "10"]  # clinic-b has 40 rows
    assert all((tmp_path / name).is_dir() for name in ("clinic-a", "clinic-b", "clinic-c"))


def test_sites_whose_classes_differ_are_told_and_class_names_mends_it(tmp_path: Path) -> None:
    grid = sites(tmp_path)
    table(tmp_path / "clinic-c.csv", 2, labels=("ill",))
    with pytest.raises(UserError, match=r"clinic-c .* class_names"):
        serve_on(grid)
    mended = sites(tmp_path, class_names=["ill", "well"])
    table(tmp_path / "clinic-c.csv", 3, labels=("ill",))
    mended.run_config["out"] = str(tmp_path / "mended")
    assert serve_on(mended) is not None


def test_a_class_that_is_not_among_the_names_is_refused(tmp_path: Path) -> None:
    grid = sites(tmp_path, class_names=["well", "unknown"])
    grid.run_config["wait"] = 0.3
    with pytest.raises(UserError, match="0 of 3 sites"):
        serve_on(grid)


def test_a_stranger_that_comes_later_is_told_to_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = sites(tmp_path)

    def brings_another(message: Message, context: Context) -> Message:
        data = table(tmp_path / "d.csv", 9)
        grid.nodes.setdefault(30, {"client": "clinic-d", "data": data, "state": str(tmp_path / "d")})
        return honest(message, context)

    grid.answers[20] = brings_another
    assert serve_on(grid) is not None
    assert any("clinic-d was not there when the experiment began" in text for text in caplog.messages)
    assert {line["selected"] for line in rounds_of(tmp_path / "flower")} == {3}


def test_columns_in_another_order_are_refused_before_the_first_round(tmp_path: Path) -> None:
    grid = sites(tmp_path)
    path = tmp_path / "clinic-c.csv"
    path.write_text(path.read_text().replace("age,dose", "dose,age"))
    with pytest.raises(UserError, match="the columns of clinic-c and clinic-a differ in name or order"):
        serve_on(grid)
    assert not (tmp_path / "flower" / "rounds.jsonl").exists()


def test_a_table_that_grows_during_a_run_costs_one_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = sites(tmp_path, rounds=3, evaluate_every=0)
    path, times = tmp_path / "clinic-c.csv", list[int]()

    def growing(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            times.append(1)
            if len(times) == 2:
                path.write_text(path.read_text() + "1.0,1.0,well\n" * 12)
                _loaded.cache_clear()  # Flower has a new process for each message
        return honest(message, context)

    grid.answers[22] = growing
    assert serve_on(grid) is not None
    lines = rounds_of(tmp_path / "flower")
    assert [line["answered"] for line in lines] == [3, 2, 3]
    assert lines[1]["refused"] == ["clinic-c"]
    assert any("and said that it has" in text for text in caplog.messages)


def test_a_site_that_lost_its_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = sites(tmp_path, rounds=2, evaluate_every=0)
    times: list[int] = []

    def careless(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            times.append(1)
            if len(times) == 2:
                shutil.rmtree(tmp_path / "clinic-a")
        return honest(message, context)

    grid.answers[21] = careless
    assert serve_on(grid) is not None
    assert [text for text in caplog.messages if "has lost" in text] == [
        "round 2: clinic-a has lost what it kept, and began anew"
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "where is the data"),
        ({"partition": 1, "data": "digits"}, "where is the data"),
        ({"partition": -1}, "partition=-1"),
        ({"partition": "x"}, "partition=x"),
        ({"data": "csv:a.csv"}, "has no name"),
        ({"data": "csv:a.csv", "client": "../up"}, "allowed are letters"),
        ({"partition": 0, "colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_bad_node_configurations(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        SiteOptions.read(given, "state")


def test_a_site_needs_a_folder_for_its_state() -> None:
    with pytest.raises(UserError, match="no folder to keep"):
        SiteOptions.read({"partition": 0}, "")


def test_what_is_wrong_at_a_site_is_said_in_its_answer(tmp_path: Path) -> None:
    grid = grid_of(small("fedavg"), tmp_path)
    grid.nodes[10] = {"client": "clinic", "data": f"csv:{tmp_path / 'none.csv'}"}
    [identity] = grid.push_messages([Message(pack({"experiment": "fedavg-1"}), 10, "query")])
    [reply] = grid.pull_messages([identity])
    assert "clinic: its data cannot be used" in facts_of(reply.content)["error"]


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "ppfe"])
def test_every_site_has_its_model_at_the_end(method: str, tmp_path: Path) -> None:
    """The files that 'tailor export' writes, by the site itself; they score what the site was told."""
    grid = grid_of(small(method, local_epochs=1, rounds=2), tmp_path)
    serve_on(grid)
    rows = list(csv.DictReader((tmp_path / "flower" / "clients.csv").open()))
    for row in rows:
        [model] = (tmp_path / "state").glob(f"*/{row['client']}/model")
        about = json.loads((model / "model.json").read_text())
        assert about["test"]["accuracy"] == pytest.approx(float(row["accuracy"]))
        assert torch.export.load(model / "model.pt2").module()(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape == (
            3,
            10,
        )
    asked = len(grid.sent)
    assert serve_on(grid) is not None  # it has ended: nobody is asked again
    assert len(grid.sent) == asked
