"""A model at work: it predicts what the run says it does, on a user's own files, and refuses others in one line."""

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from study_runs import clients, execute
from test_study_export import OBJECTS, again, samples

from tailorfl.cli import main
from tailorfl.cohort.scoring import mean_average_precision
from tailorfl.errors import UserError
from tailorfl.study.export import export
from tailorfl.study.predict import as_table, predict, stream_csv, write_csv

NATURAL: dict[str, Any] = {"partition": "natural", "samples_per_client": None, "clients": None}
QUIET = Console(quiet=True)

Rows = list[dict[str, str]]


def predicted(model: Path, *inputs: Path, **options: Any) -> Rows:
    """What is written, read again."""
    file = io.StringIO()
    stream_csv(predict(model, inputs, **options), file, QUIET)
    return list(csv.DictReader(io.StringIO(file.getvalue())))


def answers(found: Rows) -> list[tuple[str, str]]:
    return [(row["prediction"], row["probability"]) for row in found]


def said_of(folder: Path, client: str, what: str = "accuracy") -> float:
    [row] = [row for row in clients(folder) if row["client"] == client]
    return float(row[what])


def accuracy(found: Rows, truth: Iterable[str]) -> float:
    hits = [row["prediction"] == label for row, label in zip(found, truth, strict=True)]
    return sum(hits) / len(hits)


def save_tests(folder: Path, client: str, path: Path) -> list[str]:
    """The client's test inputs as an array, and their classes."""
    run = again(folder)
    inputs, targets = samples(run, client)
    np.save(path, inputs.numpy())
    return [run.built.data.classes[label] for label in targets.tolist()]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and the model of its client 1."""
    folder = tmp_path_factory.mktemp("digits")
    execute(folder / "run", "fedper", rounds=6, local_epochs=3, lr=0.1)
    export(folder / "run", "1", folder / "model")
    return folder


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a table: columns of very different scales, one of them constant, between a name and a label."""
    folder = tmp_path_factory.mktemp("hospitals")
    rng = np.random.default_rng(0)
    rows = [["pressure", "who", "pulse", "site", "label"]]
    for number, (pressure, pulse) in enumerate(rng.normal((1000, 0.01), (200, 0.001), (120, 2)).round(4)):
        sick = (pressure > 1000) == (number % 3 > 0)
        rows.append([str(pressure), f"p{number % 3}", str(pulse), "7", "sick" if sick else "well"])
    write_table(folder / "table.csv", rows)
    settings = {"data": f"csv:{folder / 'table.csv'}", "client_column": "who", **NATURAL}
    execute(folder / "run", "fedper", **settings, rounds=8, local_epochs=3, lr=0.1, network="mlp")
    export(folder / "run", "p1", folder / "model")
    return folder


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for text."""
    folder = tmp_path_factory.mktemp("films")
    words = ["fine", "bad"] * 24
    rows = [[f"{word.upper()} {'film' if n % 3 else 'song'}!", f"p{n % 3}", word] for n, word in enumerate(words)]
    write_table(folder / "table.csv", [["said", "who", "label"], *rows])
    own = {"data": f"csv:{folder / 'table.csv'}", "text_column": "said", "client_column": "who", "max_length": 4}
    sizes = {"recurrent": 4, "dimension": 4, "hidden": [4, 4]}
    execute(folder / "run", "fedper", **own, **NATURAL, network="auto", network_options=sizes, local_epochs=4, lr=0.1)
    export(folder / "run", "p1", folder / "model")
    return folder


def write_table(path: Path, rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_rows(folder: Path, client: str) -> list[int]:
    data = again(folder).built.data
    return data.test.of(data.names.index(client)).tolist()


test_rows.__test__ = False  # type: ignore[attr-defined]


def read_rows(path: Path) -> Rows:
    with path.open() as file:
        return list(csv.DictReader(file))


# It predicts what the run says.


def test_all_clients_together_are_as_good_as_the_summary_says(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", "ppfe", rounds=4)
    export(tmp_path / "run", "all", tmp_path / "models")
    hits = []
    for row in clients(tmp_path / "run"):
        truth = save_tests(tmp_path / "run", row["client"], tmp_path / "tests.npy")
        found = predicted(tmp_path / "models" / row["client"], tmp_path / "tests.npy", batch_size=2)
        assert [row["input"] for row in found] == [f"{tmp_path / 'tests.npy'}:{n + 1}" for n in range(len(truth))]
        hits += [row["prediction"] == label for row, label in zip(found, truth, strict=True)]
    assert sum(hits) / len(hits) == pytest.approx(summary["personalized_accuracy"], abs=1e-12)


def test_a_table_is_taken_as_it_is_on_disk(hospitals: Path, tmp_path: Path) -> None:
    """The rows of the run's table give what the model gave in the run: they are standardized by the same numbers."""
    run, table = again(hospitals / "run"), read_rows(hospitals / "table.csv")
    number = run.built.data.names.index("p1")
    [cohort] = run.served([number])
    inside, rows = cohort.outputs("test")[0].softmax(1), run.built.data.test.of(number).tolist()
    found = predicted(hospitals / "model", hospitals / "table.csv")
    assert len(found) == len(table)
    classes = [run.built.data.classes[label] for label in inside.argmax(1).tolist()]
    assert [found[row]["prediction"] for row in rows] == classes
    assert [float(found[row]["probability"]) for row in rows] == pytest.approx(inside.amax(1).tolist(), abs=1e-5)
    assert accuracy([found[row] for row in rows], [table[row]["label"] for row in rows]) == said_of(
        hospitals / "run", "p1"
    )
    assert said_of(hospitals / "run", "p1") > 0.5

    # Neither the label nor the client need be there, other columns and their order do not matter, it may be packed.
    head, own = ["site", "note", "pulse", "pressure"], [{**row, "note": "text"} for row in table]
    write_table(tmp_path / "new.csv", [head, *([row[name] for name in head] for row in own)])
    (tmp_path / "new.csv.gz").write_bytes(gzip.compress((tmp_path / "new.csv").read_bytes()))
    for name in ("new.csv", "new.csv.gz"):
        assert answers(predicted(hospitals / "model", tmp_path / name)) == answers(found)


def test_a_parquet_table_is_taken_too(hospitals: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = read_rows(hospitals / "table.csv")
    columns = {name: [float(row[name]) for row in table] for name in ("pulse", "pressure", "site")}
    parquet.write_table(arrow.table(columns), tmp_path / "table.parquet")
    found = predicted(hospitals / "model", tmp_path / "table.parquet")
    assert answers(found) == answers(predicted(hospitals / "model", hospitals / "table.csv"))


def test_the_model_of_a_table_says_how_columns_are_standardized(hospitals: Path) -> None:
    about = json.loads((hospitals / "model/model.json").read_text())
    table = read_rows(hospitals / "table.csv")
    numbers = np.array([[float(row[name]) for name in ("pressure", "pulse", "site")] for row in table])
    assert about["input"]["columns"] == ["pressure", "pulse", "site"]
    assert about["normalization"]["where"] == "outside"
    np.testing.assert_allclose(about["normalization"]["mean"], numbers.mean(0), rtol=1e-12)
    np.testing.assert_allclose(about["normalization"]["std"], [*numbers.std(0)[:2], 1], rtol=1e-12)


def test_a_model_in_double_precision_is_given_the_numbers_of_the_run(hospitals: Path, tmp_path: Path) -> None:
    settings = {"data": f"csv:{hospitals / 'table.csv'}", "client_column": "who", **NATURAL, "precision": "float64"}
    execute(tmp_path / "run", "fedavg", **settings, network="mlp")
    export(tmp_path / "run", "p1", tmp_path / "model")
    rows, table = test_rows(tmp_path / "run", "p1"), read_rows(hospitals / "table.csv")
    found = predicted(tmp_path / "model", hospitals / "table.csv")
    assert accuracy([found[r] for r in rows], [table[r]["label"] for r in rows]) == said_of(tmp_path / "run", "p1")


def test_a_regression_gives_numbers(hospitals: Path, tmp_path: Path) -> None:
    settings = {"data": f"csv:{hospitals / 'table.csv'}", "client_column": "who", "label_column": "pulse", **NATURAL}
    rows = [[row["pressure"], row["who"], row["pulse"]] for row in read_rows(hospitals / "table.csv")]
    write_table(tmp_path / "table.csv", [["pressure", "who", "pulse"], *rows])
    settings |= {"data": f"csv:{tmp_path / 'table.csv'}", "task": "regression", "network": "mlp", "lr": 0.01}
    execute(tmp_path / "run", "fedavg", **settings)
    export(tmp_path / "run", "p1", tmp_path / "model")
    found = predicted(tmp_path / "model", tmp_path / "table.csv")
    assert list(found[0]) == ["input", "prediction"]
    chosen = test_rows(tmp_path / "run", "p1")
    errors = [(float(found[row]["prediction"]) - float(rows[row][2])) ** 2 for row in chosen]
    assert np.mean(errors) == pytest.approx(said_of(tmp_path / "run", "p1", "loss"), rel=1e-3)
    with pytest.raises(UserError, match=r"--top 2: .* predicts a number; allowed: only for models with classes"):
        predict(tmp_path / "model", [tmp_path / "table.csv"], top=2)


def test_numbers_without_names_are_taken_in_their_order(tmp_path: Path) -> None:
    natural = {"data": "synthetic-regression", "partition": "natural", "samples": 40, "samples_per_client": None}
    execute(tmp_path / "run", "fedavg", **natural, dimension=3, network="mlp", lr=0.01)
    export(tmp_path / "run", "1", tmp_path / "model")
    inputs, targets = samples(again(tmp_path / "run"), "1")
    write_table(tmp_path / "new.csv", [["a", "b", "c"], *([repr(x) for x in row] for row in inputs.tolist())])
    found = [float(row["prediction"]) for row in predicted(tmp_path / "model", tmp_path / "new.csv")]
    errors = (torch.tensor(found) - targets).square().mean().item()
    assert errors == pytest.approx(said_of(tmp_path / "run", "1", "loss"), rel=1e-4)
    write_table(tmp_path / "wide.csv", [["a", "b", "c", "d"], ["1", "2", "3", "4"]])
    with pytest.raises(UserError, match=r"wide.csv has 4 columns; allowed: 3, in the order of the training data"):
        predict(tmp_path / "model", [tmp_path / "wide.csv"])


def test_text_is_taken_by_the_line_or_from_a_table(films: Path, tmp_path: Path) -> None:
    table = read_rows(films / "table.csv")
    found = predicted(films / "model", films / "table.csv")
    chosen = test_rows(films / "run", "p1")
    wanted = said_of(films / "run", "p1")
    assert accuracy([found[row] for row in chosen], [table[row]["label"] for row in chosen]) == wanted
    (tmp_path / "new.txt").write_text(f"{table[0]['said']}\n\nan unknown word\n")
    lines = predicted(films / "model", tmp_path / "new.txt")
    assert [row["input"] for row in lines] == [f"{tmp_path / 'new.txt'}:{number}" for number in (1, 3)]
    assert answers(lines[:1]) == answers(found[:1])


def test_text_that_cannot_be_read_is_refused(films: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[2, 3, 99, 0]]))
    write_table(tmp_path / "other.csv", [["words"], ["fine"]])
    (tmp_path / "empty.txt").write_text("\n\n")
    for file, problem in (
        (tmp_path / "ids.npy", r"holds word ids from 0 to 99; allowed: 0 to 6$"),
        (tmp_path / "other.csv", r"other\.csv has no column 'said', of which the model takes the text$"),
        (tmp_path / "empty.txt", r"has no text in it$"),
        (films / "model/model.pt2", r"cannot be read as text"),
        (tmp_path, r"is a folder; allowed: files of text"),
    ):
        with pytest.raises(UserError, match=problem):
            predict(films / "model", [file])


def test_image_files_are_brought_to_the_form_of_the_model(digits: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    inputs, _ = samples(again(digits / "run"), "1")
    np.save(tmp_path / "tests.npy", inputs.numpy())
    wanted = [row["probability"] for row in predicted(digits / "model", tmp_path / "tests.npy")]
    (tmp_path / "images/more/.hidden").mkdir(parents=True)
    for number, pixels in enumerate(inputs[:, 0].numpy()):
        plain = image.fromarray(pixels)
        place = tmp_path / ("images" if number % 2 else "images/more") / f"{number:03}.png"
        # Three times as large, or in colour: box and greyscale undo that to the last bit.
        (plain.resize((24, 24), image.Resampling.NEAREST) if number % 2 else plain.convert("RGB")).save(place)
    plain.save(tmp_path / "images/more/.hidden/a.png")
    (tmp_path / "images/notes.txt").write_text("no image")
    found = predicted(digits / "model", tmp_path / "images", batch_size=2)
    by_number = {int(Path(row["input"]).stem): row["probability"] for row in found}
    assert [by_number[number] for number in range(len(wanted))] == wanted
    assert len(found) == len(wanted)


def test_images_are_inverted_where_training_did_that(digits: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = samples(again(digits / "run"), "1")[0][0].numpy()
    image.fromarray(255 - pixels[0]).save(tmp_path / "black-on-white.png")
    np.save(tmp_path / "one.npy", pixels)
    about = json.loads((digits / "model/model.json").read_text())
    about["input"]["files"]["inverted"] = True
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.json").write_text(json.dumps(about))
    (tmp_path / "model/model.pt2").symlink_to(digits / "model/model.pt2")
    [one] = predicted(digits / "model", tmp_path / "one.npy")
    [other] = predicted(tmp_path / "model", tmp_path / "black-on-white.png")
    assert (one["prediction"], one["probability"]) == (other["prediction"], other["probability"])


def test_a_detector_gives_a_row_an_object_in_pixels_of_the_file(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    execute(tmp_path / "run", "fedper", **OBJECTS)
    export(tmp_path / "run", "1", tmp_path / "model")
    run = again(tmp_path / "run")
    data, rows = run.built.data, run.built.data.test.of(1)
    np.save(tmp_path / "tests.npy", data.inputs[rows].numpy())
    found = predicted(tmp_path / "model", tmp_path / "tests.npy", threshold=0.03)
    assert list(found[0]) == ["input", "prediction", "probability", "x0", "y0", "x1", "y1"]
    objects = [[row for row in found if row["input"] == f"{tmp_path / 'tests.npy'}:{n + 1}"] for n in range(len(rows))]
    tensors = [torch.tensor([_object(row, list(data.classes)) for row in own]).view(-1, 6) for own in objects]
    precision = mean_average_precision(data, rows, tensors)
    assert precision == pytest.approx(said_of(tmp_path / "run", "1"), abs=1e-3)
    # Twice as wide: the boxes too.
    image.fromarray(data.inputs[rows[0]].permute(1, 2, 0).numpy()).resize((64, 32), image.Resampling.NEAREST).save(
        tmp_path / "wide.png"
    )
    wide = predicted(tmp_path / "model", tmp_path / "wide.png", threshold=0.03, top=1)
    assert float(wide[0]["x1"]) == pytest.approx(2 * float(objects[0][0]["x1"]), abs=0.11)
    assert float(wide[0]["y1"]) == pytest.approx(float(objects[0][0]["y1"]), abs=0.11)
    assert len(wide) == 1


def _object(row: dict[str, str], classes: list[str]) -> list[float]:
    box = [float(row[side]) / 32 for side in ("x0", "y0", "x1", "y1")]
    return [classes.index(row["prediction"]), float(row["probability"]), *box]


# What is written.


def test_the_likeliest_classes_come_in_order(digits: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", samples(again(digits / "run"), "1")[0][0].numpy())
    [row] = predicted(digits / "model", tmp_path / "one.npy", top=3)
    assert list(row)[1:] == [
        *("prediction", "probability", "prediction_2", "probability_2", "prediction_3", "probability_3"),
    ]
    [every] = predicted(digits / "model", tmp_path / "one.npy", top=99)
    probabilities = [float(value) for name, value in every.items() if name.startswith("probability")]
    assert len(probabilities) == 10
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert probabilities == sorted(probabilities, reverse=True)
    assert [row["probability"], row["probability_3"]] == [every["probability"], every["probability_3"]]


def test_a_terminal_shows_the_first_and_says_so(digits: Path, tmp_path: Path) -> None:
    inputs = np.zeros((50, 1, 8, 8), np.uint8)
    np.save(tmp_path / "[b]many.npy", inputs)
    table = as_table(predict(digits / "model", [tmp_path / "[b]many.npy"]))
    shown = Console(file=io.StringIO(), width=200)
    shown.print(table)
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert table.row_count == 40
    assert "[b]many.npy:40" in text
    assert "the first 40 rows; --out FILE.csv has all" in text


def test_a_file_is_written_when_all_is_well_and_never_over_an_input(hospitals: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_bytes((hospitals / "table.csv").read_bytes())
    found = predict(hospitals / "model", [table])
    assert write_csv(found, tmp_path / "new/out.csv", QUIET) == 120
    assert len(read_rows(tmp_path / "new/out.csv")) == 120
    (tmp_path / "photo.png").write_text("mine")
    refused = {table: "is an input; allowed: another name", tmp_path: "is a folder", tmp_path / "photo.png": "not CSV"}
    for out, problem in refused.items():
        with pytest.raises(UserError, match=problem):
            write_csv(found, out, QUIET)
    assert table.read_bytes() == (hospitals / "table.csv").read_bytes()
    assert (tmp_path / "photo.png").read_text() == "mine"


def test_an_image_that_cannot_be_read_is_named_and_leaves_no_file(digits: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "images").mkdir()
    for name in "abc":
        image.new("L", (8, 8)).save(tmp_path / f"images/{name}.png")
    whole = (tmp_path / "images/b.png").read_bytes()
    (tmp_path / "images/b.png").write_bytes(whole[:40])
    found = predict(digits / "model", [tmp_path / "images"], batch_size=1)
    with pytest.raises(UserError, match=r"b\.png is not an image that can be read"):
        write_csv(found, tmp_path / "out.csv", QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


# What is refused.


@pytest.mark.parametrize(
    ("header", "row", "problem"),
    [
        ("pressure,site", "1,7", "has no column 'pulse'; the model takes: pressure, pulse, site"),
        ("pressure,pulse,site", "1,high,7", "column pulse has 'high', allowed: a number in every row"),
        ("pressure,pulse,site", "1,,7", "column pulse has '', allowed: a number in every row"),
        ("pressure,pulse,site", "1,2", "row 1 has 2 values, the header has 3"),
        ("pressure,pulse,site", "", "has no rows"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    header: str, row: str, problem: str, hospitals: Path, tmp_path: Path
) -> None:
    (tmp_path / "new.csv").write_text(f"{header}\n{row}\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/new.csv:? {problem}"):
        predict(hospitals / "model", [tmp_path / "new.csv"])


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((3, 8, 8), np.uint8), r"has the shape 3 x 8 x 8; allowed: N x 1 x 8 x 8, or 1 x 8 x 8"),
        (np.zeros((3, 1, 8, 8)), "holds float64; allowed: uint8"),
        (np.zeros((0, 1, 8, 8), np.uint8), "has no rows"),
        (np.array([object()]), r"is not an array that can be read \(Object arrays cannot be loaded"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(array: np.ndarray, problem: str, digits: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "new.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=problem):
        predict(digits / "model", [tmp_path / "new.npy"])


def test_a_folder_that_is_no_model_is_refused(digits: Path, hospitals: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros((1, 8, 8), np.uint8))
    export(digits / "run", "all", tmp_path / "models")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.json").write_text('{"format": "tailorfl model 1"}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/model.json").write_bytes((digits / "model/model.json").read_bytes())
    (tmp_path / "torn/model.pt2").write_bytes((digits / "model/model.pt2").read_bytes()[:500])
    (tmp_path / "words").mkdir()
    (tmp_path / "words/model.json").write_text("{")
    for name, problem in (
        ("nowhere", r"nowhere holds no model \(model.json is missing\); allowed: a folder that 'tailor export'"),
        ("models", r"models holds a model in each of its folders; allowed: one of these, 0, 1, 2, 3, 4"),
        ("other", r"model.json has the format 'tailorfl model 1'; allowed: 'tailorfl model 2', as 'tailor export'"),
        ("torn", r"model.pt2 cannot be loaded: "),
        ("words", r"model.json cannot be read: "),
    ):
        with pytest.raises(UserError, match=problem) as refused:
            predict(tmp_path / name, [tmp_path / "one.npy"])
        assert "\n" not in str(refused.value)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tailor", "predict", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_takes_images_tables_and_text(
    digits: Path,
    hospitals: Path,
    films: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for name in ("one.png", "photos/a.jpg", "photos/b.png"):
        image.new("RGB", (20, 30), "grey").save(name)
    Path("said.txt").write_text("a fine film\n")
    assert run_command(monkeypatch, str(digits / "model"), "one.png", "photos") == 0
    assert run_command(monkeypatch, str(films / "model"), "said.txt", "--top", "2") == 0
    head, *images, text_head, text = capsys.readouterr().out.splitlines()
    assert head == "input,prediction,probability"
    assert [line.split(",")[0] for line in images] == ["one.png", "photos/a.jpg", "photos/b.png"]
    assert text_head == "input,prediction,probability,prediction_2,probability_2"
    assert text.startswith("said.txt:1,")
    assert run_command(monkeypatch, str(hospitals / "model"), str(hospitals / "table.csv"), "--out", "out.csv") == 0
    assert capsys.readouterr().out == "written: out.csv (120 rows)\n"
    assert read_rows(Path("out.csv")) == predicted(hospitals / "model", hospitals / "table.csv")


def test_the_command_refuses_in_one_line(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("one.npy", np.zeros((1, 8, 8), np.uint8))
    Path("empty").mkdir()
    Path("words.png").write_text("no image")
    model = str(digits / "model")
    for arguments, problem in (
        ([model, "one.npy", "gone.png"], "gone.png: no such file or folder"),
        ([model, "empty"], "empty has no images; allowed: .bmp, "),
        ([model, "words.png"], "words.png is not an image that can be read ("),
        ([model, "one.npy", "--threshold", "0.2"], f"--threshold 0.2: {model} finds no objects; allowed: only for"),
        (["empty", "one.npy"], "empty holds no model (model.json is missing); allowed: a folder that 'tailor export'"),
        ([model, "one.npy", "--batch-size", "0"], "Invalid value for '--batch-size'"),
        ([model], "Missing argument 'INPUT"),
    ):
        assert run_command(monkeypatch, *arguments, "--out", "out.csv") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tailor: {problem}")
    assert not Path("out.csv").exists()
    assert run_command(monkeypatch, model, "words.png") == 2
    assert capsys.readouterr().out == ""
