"""A user's own data: image folders, tables, Hugging Face datasets, prepared files."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image as PillowImage
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tailorfl.data import PartitionOptions, SourceOptions, federate, load_source, save_source
from tailorfl.data.sources.table import read_csv
from tailorfl.errors import UserError


def paint(path: Path, colour: Any, size: tuple[int, int] = (6, 6), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PillowImage.new(mode, size, colour).save(path)


def test_a_folder_of_classes_is_read(tmp_path: Path) -> None:
    paint(tmp_path / "dog/1.png", (255, 0, 0))
    paint(tmp_path / "cat/1.PNG", (0, 0, 255))
    source = load_source(f"folder:{tmp_path}")
    assert source.classes == ("cat", "dog")
    assert source.inputs[:, :, 0, 0].tolist() == [[0, 0, 255], [255, 0, 0]]
    assert source.test_size == 0


def test_a_folder_with_train_and_test_is_read(tmp_path: Path) -> None:
    paint(tmp_path / "train/a/1.png", 10, mode="L")
    paint(tmp_path / "train/b/1.png", 20, mode="L")
    paint(tmp_path / "test/b/1.png", 30, mode="L")
    source = load_source(f"folder:{tmp_path}")
    assert source.inputs.shape == (3, 1, 6, 6)
    assert source.inputs[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert (source.train_size, source.targets.tolist()) == (2, [0, 1, 1])


def test_a_folder_of_clients_is_read(tmp_path: Path) -> None:
    for client, label in (("north", "a"), ("north", "b"), ("south", "b")):
        paint(tmp_path / client / label / "1.png", 1, mode="L")
    source = load_source(f"folder:{tmp_path}", None, SourceOptions(client_folders=True))
    assert source.owners == ("north", "south")
    assert source.owner is not None
    assert (source.owner.tolist(), source.targets.tolist()) == ([0, 0, 1], [0, 1, 1])


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    paint(tmp_path / "a/1.png", 1, (6, 6), "L")
    paint(tmp_path / "a/2.png", 1, (8, 4), "L")
    with pytest.raises(UserError, match="images of 2 sizes, 8x4 to 6x6; set image_size=PIXELS"):
        load_source(f"folder:{tmp_path}")
    assert load_source(f"folder:{tmp_path}", None, SourceOptions(image_size=5)).inputs.shape == (2, 1, 5, 5)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        load_source(f"folder:{tmp_path}/nowhere")
    with pytest.raises(UserError, match="has no images in <class>/<image>"):
        load_source(f"folder:{tmp_path}")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.png").write_text("no image")
    with pytest.raises(UserError, match=r"1\.png is not an image that can be read"):
        load_source(f"folder:{tmp_path}")


TABLE = "site,height,width,kind\nx,1,10,oak\ny,2,10,elm\nx,3,10,oak\n"


def csv_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "t.csv").write_text(text)
    return f"csv:{tmp_path / 't.csv'}"


def test_a_csv_table_has_standardized_features_and_clients(tmp_path: Path) -> None:
    source = load_source(csv_file(tmp_path, TABLE), None, SourceOptions(client_column="site"))
    step = np.sqrt(1.5)
    assert torch.allclose(source.inputs, torch.tensor([[-step, 0], [0, 0], [step, 0]], dtype=torch.float32))
    assert (source.classes, source.targets.tolist()) == (("elm", "oak"), [1, 0, 1])
    assert source.owners == ("x", "y")


def test_blanks_around_a_label_or_a_client_make_no_other_of_it(tmp_path: Path) -> None:
    text = "site,height,kind\nx,1,oak\ny ,2,oak \n y,3, elm\nx,4,elm\n"
    source = load_source(csv_file(tmp_path, text), None, SourceOptions(client_column="site"))
    assert (source.classes, source.targets.tolist()) == (("elm", "oak"), [1, 1, 0, 0])
    assert source.owner is not None
    assert (source.owners, source.owner.tolist()) == (("x", "y"), [0, 1, 1, 0])


def test_large_numbers_are_standardized_as_others_are(tmp_path: Path) -> None:
    source = load_source(csv_file(tmp_path, "a,label\n1e38,x\n-1e38,y\n"))
    assert source.inputs.tolist() == [[1], [-1]]


def test_class_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    source = load_source(csv_file(tmp_path, "a,label\n1,10\n2,9\n3,10\n"))
    assert source.classes == ("9", "10")


def test_a_label_column_may_stand_anywhere(tmp_path: Path) -> None:
    options = SourceOptions(label_column="height", client_column="site", text_column="kind", task="regression")
    source = load_source(csv_file(tmp_path, TABLE), None, options)
    assert source.regression
    assert source.targets.tolist() == [1, 2, 3]
    assert source.kind == "text"
    assert source.vocabulary[2:] == ("oak", "elm")


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        (TABLE, {}, "column site has 'x', allowed: a number in every row"),
        (TABLE, {"label_column": "size"}, "no column label_column=size; allowed: site, height, width, kind"),
        (TABLE, {"client_column": "who"}, "no column client_column=who; allowed: site"),
        ("a,b\n1,2\n3\n", {}, "row 2 has 1 values, the header has 2"),
        ("a,b\n,2\n", {}, "column a has '', allowed: a number"),
        ("a,b,a,y\n1,2,3,4\n", {}, "has two columns named 'a'; allowed: every name once"),
        ("a,b\n1,x\n-1e300,y\n", {}, r"column a has -1e300 in row 2, allowed: up to 3\.4e\+38"),
        ("a,b\n1,2\n1,1e39\n", {"task": "regression"}, "column b has 1e39 in row 2, allowed: up to"),
        ("a,b\n", {}, "has no rows"),
        ("", {}, "has no rows"),
        ("b\n1\n", {}, "has no feature columns"),
        (
            "a,b\n" + "".join(f"1,{i}.5\n" for i in range(60)),
            {},
            "60 different real numbers; allowed: .*task=regression",
        ),
        (TABLE, {"client_column": "site", "task": "regression"}, "column kind has 'oak'"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, text: str, options: dict, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        load_source(csv_file(tmp_path, text), None, SourceOptions(**options))
    assert "\n" not in str(caught.value)


def test_a_missing_table_is_refused() -> None:
    for kind in ("csv", "parquet", "file"):
        with pytest.raises(UserError, match=f"data={kind}:nowhere cannot be read"):
            load_source(f"{kind}:nowhere")


def test_a_parquet_table_reads_like_a_csv_table(tmp_path: Path) -> None:
    table = pa.table(
        {"site": ["x", "y", "x"], "height": [1, 2, 3], "width": [10, 10, 10], "kind": ["oak", "elm", "oak"]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    options = SourceOptions(client_column="site")
    ours = load_source(f"parquet:{tmp_path / 't.parquet'}", None, options)
    same = load_source(csv_file(tmp_path, TABLE), None, options)
    assert torch.equal(ours.inputs, same.inputs)
    assert torch.equal(ours.targets, same.targets)
    assert ours.owners == same.owners


def test_a_file_that_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("a,b")
    with pytest.raises(UserError, match="cannot be read"):
        load_source(f"parquet:{tmp_path / 't.parquet'}")


class ClassLabel:
    dtype = "int64"

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Image:
    dtype = "PIL.Image.Image"


class Value:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class FakeDataset:
    """The part of a Hugging Face dataset that is used."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features, self.rows = features, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> Any:
        return self.rows[key] if isinstance(key, int) else [row[key] for row in self.rows]

    def select_columns(self, names: list[str]) -> list[dict[str, Any]]:
        return [{name: row[name] for name in names} for row in self.rows]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, FakeDataset]]:
    """A stand-in for the package ``datasets``: name to split to dataset."""
    stored: dict[str, dict[str, FakeDataset]] = {}
    module = ModuleType("datasets")

    def load_dataset(path: str, name: str | None = None, *, split: str) -> FakeDataset:
        return stored[f"{path}:{name}" if name else path][split]

    def get_dataset_split_names(path: str, config_name: str | None = None) -> list[str]:
        key = f"{path}:{config_name}" if config_name else path
        if key not in stored:
            raise FileNotFoundError(f"Dataset '{key}' doesn't exist\non the hub")
        return list(stored[key])

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.get_dataset_split_names = get_dataset_split_names  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return stored


def test_a_hub_dataset_of_images_is_read(hub: dict) -> None:
    features = {"image": Image(), "label": ClassLabel(["cat", "dog"]), "writer": Value("string")}
    rows = [{"image": PillowImage.new("L", (4, 4), 10 * i), "label": i % 2, "writer": "ab"[i // 2]} for i in range(4)]
    hub["org/pets"] = {"train": FakeDataset(features, rows[:3]), "test": FakeDataset(features, rows[3:])}
    source = load_source("hf:org/pets", None, SourceOptions(client_column="writer"))
    assert source.inputs[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert (source.train_size, source.classes) == (3, ("cat", "dog"))
    assert source.owner is not None
    assert source.owner.tolist() == [0, 0, 1, 1]


def test_a_hub_dataset_of_text_is_read_with_its_configuration(hub: dict) -> None:
    features = {"sentence": Value("string"), "label": ClassLabel(["bad", "good"])}
    rows = [{"sentence": "so so", "label": 1}, {"sentence": "so", "label": 0}]
    hub["glue:sst2"] = {"train": FakeDataset(features, rows), "validation": FakeDataset(features, rows[:1])}
    source = load_source("hf:glue:sst2", None, SourceOptions(test_split="validation", max_length=2))
    assert source.kind == "text"
    assert source.inputs.tolist() == [[2, 2], [2, 0], [2, 2]]
    assert source.test_size == 1


def test_a_hub_dataset_of_numbers_is_read(hub: dict) -> None:
    features = {"a": Value("float32"), "b": Value("int64"), "target": Value("int64")}
    rows = [{"a": 1.0, "b": 2, "target": 7}, {"a": 3.0, "b": 2, "target": 5}]
    hub["numbers"] = {"train": FakeDataset(features, rows)}
    source = load_source("hf:numbers")
    assert source.inputs.tolist() == [[-1, 0], [1, 0]]
    assert source.classes == ("5", "7")


def test_bad_hub_requests_are_refused(hub: dict) -> None:
    features = {"a": Value("float32"), "b": Value("int64")}
    hub["numbers"] = {"train": FakeDataset(features, [{"a": 1.0, "b": 2}])}
    with pytest.raises(UserError, match="no clear label: set label_column to one of a, b"):
        load_source("hf:numbers")
    with pytest.raises(UserError, match="has no split all; allowed: train"):
        load_source("hf:numbers", None, SourceOptions(train_split="all"))
    with pytest.raises(UserError, match="no column client_column=c; allowed: a, b"):
        load_source("hf:numbers", None, SourceOptions(label_column="b", client_column="c"))
    with pytest.raises(UserError, match=r"data=hf:nowhere cannot be loaded: Dataset 'nowhere' doesn't exist$"):
        load_source("hf:nowhere")


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"install tailorfl\[data\]"):
        load_source("hf:mnist")


def test_a_prepared_source_comes_back_the_same(tmp_path: Path) -> None:
    source = load_source("synthetic", None, SourceOptions(clients=3))
    save_source(source, tmp_path / "deep/s.safetensors")
    again = load_source(f"file:{tmp_path / 'deep/s.safetensors'}")
    assert torch.equal(again.inputs, source.inputs)
    assert torch.equal(again.owner, source.owner)  # type: ignore[arg-type]
    assert (again.name, again.classes, again.owners) == (source.name, source.classes, source.owners)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["s.safetensors"]


def test_a_prepared_table_knows_how_others_are_read(tmp_path: Path) -> None:
    source = load_source(csv_file(tmp_path, TABLE), None, SourceOptions(client_column="site"))
    save_source(source, tmp_path / "s.safetensors")
    assert source.reading.columns == (("height", 2.0, np.sqrt(2 / 3)), ("width", 10.0, 1.0))
    assert load_source(f"file:{tmp_path / 's.safetensors'}").reading == source.reading


def test_a_prepared_table_that_does_not_say_how_it_was_read_is_refused(tmp_path: Path) -> None:
    for name, options in (
        ("digits", SourceOptions()),
        (csv_file(tmp_path, TABLE), SourceOptions(client_column="site")),
    ):
        path = tmp_path / "s.safetensors"
        save_source(load_source(name, None, options), path)
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
        del facts["reading"]  # as it was before there were readings
        save_file(load_file(path), path, facts)
        if name == "digits":
            assert load_source(f"file:{path}").kind == "image"
        else:
            with pytest.raises(UserError, match=r"lacks its columns; allowed: write it again by `tailor data prepare`"):
                load_source(f"file:{path}")


def test_a_prepared_source_may_be_thinned(tmp_path: Path) -> None:
    save_source(load_source("digits"), tmp_path / "s.safetensors", limit=100)
    again = load_source(f"file:{tmp_path / 's.safetensors'}")
    assert again.train_size == 100
    assert set(again.targets.tolist()) == set(range(10))


def test_text_with_vectors_can_be_prepared(tmp_path: Path) -> None:
    (tmp_path / "glove.txt").write_text("oak 1 2\n")
    options = SourceOptions(text_column="kind", label_column="width", glove=tmp_path / "glove.txt")
    source = load_source(csv_file(tmp_path, TABLE), None, options)
    save_source(source, tmp_path / "s.safetensors")
    again = load_source(f"file:{tmp_path / 's.safetensors'}")
    assert again.vocabulary == source.vocabulary
    assert torch.equal(again.vectors, source.vectors)  # type: ignore[arg-type]


def test_a_failed_save_leaves_nothing_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.safetensors"
    path.write_text("old")

    def fail(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr("tailorfl.data.sources.prepared.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_source(load_source("digits"), path)
    assert [file.name for file in tmp_path.iterdir()] == ["s.safetensors"]
    assert path.read_text() == "old"


def test_another_file_is_not_taken_for_a_prepared_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no")
    with pytest.raises(UserError, match="cannot be read"):
        load_source(f"file:{tmp_path / 'x'}")


def test_a_table_with_clients_can_be_federated_naturally(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{'xyz'[i % 3]}\n" for i in range(60))
    options = SourceOptions(label_column="label", client_column="who")
    source = load_source(csv_file(tmp_path, f"a,label,who\n{rows}"), None, options)
    data = federate(source, PartitionOptions(partition="natural"), 0)
    assert data.names == ("x", "y", "z")
    assert data.train.counts.tolist() == [15, 15, 15]


@pytest.mark.parametrize(("option", "text"), [("label_column", "0.1,a,\n"), ("client_column", "0.1,,x\n")])
def test_a_row_without_a_label_or_a_client_is_named(tmp_path: Path, option: str, text: str) -> None:
    (tmp_path / "table.csv").write_text("dose,site,y\n" + "0.2,a,x\n0.3,b,z\n" * 5 + text)
    column = {"label_column": "y", "client_column": "site"}[option]
    options = SourceOptions(label_column="y", client_column="site")
    with pytest.raises(UserError, match=f"{option}={column} is empty in row 11; allowed: a value in every row"):
        load_source(f"csv:{tmp_path / 'table.csv'}", None, options)


def test_columns_without_names_and_values_and_repeated_ones_that_nobody_uses_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,y,,\n1,2,,\n3,4,,\n")  # as spreadsheets write it
    assert read_csv(file, "t") == {"a": ("1", "3"), "y": ("2", "4")}
    file.write_text("a,note,note\n1,x,y\n")
    assert read_csv(file, "t", used={"a"})["a"] == ("1",)
    with pytest.raises(UserError, match="two columns named 'note'"):
        read_csv(file, "t")
