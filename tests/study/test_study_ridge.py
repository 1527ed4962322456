"""The synthetic study of PPFE: its estimators by hand, its claims on small federations, its command."""

import csv
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from study_runs import Tailor
from torch import Tensor

from tailorfl.errors import UserError
from tailorfl.study.recipe_files import recipes
from tailorfl.study.reproduce import STUDIES, read_options
from tailorfl.study.ridge import (
    METHODS,
    Federation,
    Figure3,
    Ridge,
    Rows,
    choose,
    draw,
    falling,
    fedavg,
    local,
    measure,
    personal_shares,
    ppfe,
    scores,
    sweep,
)

SCARCE: dict[str, Any] = {"dimension": 30, "samples": 60, "test_samples": 200, "clients": (5,), "fixed_clients": 40}
QUICK = ("dimension=6", "samples=20", "test_samples=20", "clients=[3,5]", "fixed_clients=4", "repetitions=2")
SMALLEST: dict[str, Any] = {key: yaml.safe_load(value) for key, value in (pair.split("=") for pair in QUICK)}


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_rows(inputs: Tensor, targets: Tensor) -> Federation:
    """The same rows for training, validation and test."""
    rows = Rows(inputs, targets)
    return Federation(Ridge.of(inputs), rows, rows, rows)


@pytest.fixture(scope="module")
def scarce() -> Federation:
    """Clients that differ, with fewer training rows than they need."""
    return draw(Figure3(**SCARCE), 0).federation(40, 0.4)


# The estimators.


def test_ridge_of_one_feature_is_the_fraction_on_paper() -> None:
    # x = (1, 2): mean of x^2 is 2.5; y = (2, 4) has mean x y = 5, y = (1, 1) has 1.5.
    federation = of_rows(numbers([[1.0], [2.0]], [[1.0], [2.0]]), numbers([2.0, 4.0], [1.0, 1.0]))
    found = local(federation, numbers(0.5, 2.5))[:, 0, :, 0]
    torch.testing.assert_close(found, numbers([5 / 3, 5 / 5], [1.5 / 3, 1.5 / 5]))
    torch.testing.assert_close(fedavg(federation, numbers(0.5, 2.5))[:, 0, :, 0], numbers([6.5 / 6, 6.5 / 10]))


def test_ridge_solves_the_normal_equations_of_every_client(scarce: Federation) -> None:
    found = local(scarce, numbers(0.01, 0.3))
    inputs, targets = scarce.train.inputs, scarce.train.targets
    for place, penalty in enumerate((0.01, 0.3)):
        for client in (0, 17):
            x, y = inputs[client], targets[client]
            expected = torch.linalg.solve(x.T @ x / len(x) + penalty * torch.eye(30).double(), x.T @ y / len(x))
            torch.testing.assert_close(found[client, :, place, 0], expected, rtol=1e-9, atol=1e-11)


def test_two_stages_of_ppfe_by_hand() -> None:
    # Two clients of one row, x = 1, y = 1 and 3. Stage 1, penalty 1: y / 2, mean 1. It leaves 0 and 2.
    # Stage 2, penalty 1 / 2: 0 and 4/3, mean 2/3. Half of it personal: 1/3 and 1. All of it: 0 and 4/3.
    federation = of_rows(numbers([[1.0]], [[1.0]]), numbers([1.0], [3.0]))
    shares = [torch.zeros(1, 1, 2), numbers(0.5, 1.0)[None, None]]
    found = ppfe(federation, numbers([1.0], [0.5]), shares)[:, 0, 0]
    torch.testing.assert_close(found, numbers([4 / 3, 1.0], [2.0, 7 / 3]))


def test_the_last_coordinates_become_personal_first() -> None:
    options = Figure3(dimension=6, personal="coordinates", complexities=(0.5, 1))
    shares = [share[:, 0, :].T.tolist() for share in personal_shares(options)]
    assert shares[0] == [[0] * 6, [0] * 6]
    assert shares[1] == [[0, 0, 0, 0, 0.5, 0.5], [0, 0, 0, 0, 1, 1]]
    assert shares[2] == [[0, 0, 0.25, 0.25, 0.25, 0.25], [0, 0, 1, 1, 1, 1]]
    assert shares[3] == [[0.125] * 6, [1] * 6]


def test_a_blend_grows_from_shared_to_personal() -> None:
    shares = torch.cat(personal_shares(Figure3(complexities=(0, 0.5, 1))))[:, 0]
    torch.testing.assert_close(shares, numbers([0, 0, 0], [0, 1 / 6, 1 / 3], [0, 1 / 6, 2 / 3], [0, 1 / 8, 1]))


@pytest.mark.parametrize("decay", [1, 0.5, 0.1])
def test_the_penalty_never_rises_from_stage_to_stage(decay: float) -> None:
    penalties = falling(Figure3(decay=decay))
    assert torch.equal(penalties[0], numbers(*Figure3().penalties))
    assert torch.allclose(penalties[1:], decay * penalties[:-1])


@pytest.mark.parametrize("personal", ["blend", "coordinates"])
def test_ppfe_whose_later_stages_are_penalized_away_is_fedavg(scarce: Federation, personal: str) -> None:
    options = Figure3(**SCARCE, personal=personal)
    penalties = falling(options)
    penalties[1:] = torch.inf
    found, plain = ppfe(scarce, penalties, personal_shares(options)), fedavg(scarce, penalties[0])
    assert torch.equal(found, plain.expand_as(found))


def test_ppfe_of_one_stage_is_fedavg(scarce: Federation) -> None:
    ensemble, _, average = measure(scarce, Figure3(**SCARCE, stages=1))
    assert ensemble["test_mse"] == average["test_mse"]
    assert ensemble["penalty"] == average["penalty"]


def test_a_stage_lowers_the_training_error_of_clients_that_keep_all_of_it(scarce: Federation) -> None:
    errors = []
    for stages in (1, 2, 3, 4):
        shares = [torch.ones(1, 1, 1, dtype=torch.float64)] * stages
        weights = ppfe(scarce, torch.ones(stages, 1, dtype=torch.float64), shares)
        errors.append(scarce.train.errors(weights)[:, 0, 0])
    assert all((after < before).all() for before, after in pairwise(errors))


# The choice.


def test_the_candidate_with_the_least_validation_error_is_chosen(scarce: Federation) -> None:
    candidates = ppfe(scarce, falling(Figure3(**SCARCE)), personal_shares(Figure3(**SCARCE)))
    rows = scarce.validation
    errors = {
        (penalty, complexity): float(
            (rows.targets - (rows.inputs * candidates[:, None, :, penalty, complexity]).sum(-1)).square().mean()
        )
        for penalty in range(candidates.shape[2])
        for complexity in range(candidates.shape[3])
    }
    fit = choose(scarce, candidates)
    assert (fit.penalty, fit.complexity) == min(errors, key=errors.__getitem__)
    assert fit.validation == pytest.approx(min(errors.values()))
    assert 0 < fit.penalty < candidates.shape[2] - 1
    assert 0 < fit.complexity < candidates.shape[3] - 1


def test_test_rows_change_the_test_error_and_nothing_else(scarce: Federation) -> None:
    options = Figure3(**SCARCE)
    other = replace(scarce, test=Rows(scarce.test.inputs.flip(0), scarce.test.targets - 7))
    for before, after in zip(measure(scarce, options), measure(other, options), strict=True):
        assert after.pop("test_mse") > before.pop("test_mse") + 1
        assert before == after
    assert [row["method"] for row in measure(scarce, options)] == list(METHODS)


def test_fewer_test_rows_leave_every_choice_as_it_is() -> None:
    small = {**SCARCE, "ratios": (0.3,), "repetitions": 1}
    many, few = sweep(Figure3(**small)), sweep(Figure3(**{**small, "test_samples": 50}))
    assert [row.pop("test_mse") for row in many] != [row.pop("test_mse") for row in few]
    assert many == few


# The data.


def test_targets_follow_equations_15_and_16() -> None:
    options = Figure3(**SCARCE, noise=0.3)
    drawn = draw(options, 0)
    ratios = drawn.ratios[:, None]
    for ratio, share in ((0.0, 0), (0.3, 0.3), (1.0, 1), ("mixed", ratios)):
        weights = (1 - share) * drawn.shared + share * drawn.personal
        test = drawn.federation(40, ratio).test
        left = test.targets - torch.einsum("ksd,kd->ks", test.inputs, weights)
        assert left.std() == pytest.approx(0.3, rel=0.03)
        assert torch.allclose(left, drawn.test.targets)
    assert ratios.min() < 0.1 < 0.9 < ratios.max()


def test_clients_have_their_own_covariance_and_scale() -> None:
    options = Figure3(dimension=2, test_samples=20_000, clients=(50,), variances=(0.5, 1.5), alphas=(0.25, 4))
    drawn = draw(options, 0)
    covariance = drawn.test.inputs.mT @ drawn.test.inputs / 20_000
    assert 0.45 < torch.linalg.eigvalsh(covariance).min() < 0.7
    assert 1.3 < torch.linalg.eigvalsh(covariance).max() < 1.6
    assert covariance[:, 0, 1].std() > 0.1  # axes that differ
    wide = draw(Figure3(dimension=150, samples=5, test_samples=1, clients=(20,), fixed_clients=20, alphas=(0.25, 4)), 0)
    scales = wide.personal.square().mean(1) * 150  # alpha_k, up to sampling
    assert scales.min() < 1 < 3 < scales.max()
    assert wide.shared.square().mean() * 150 == pytest.approx(1, rel=0.3)


def test_a_fifth_of_the_training_rows_is_for_validation() -> None:
    drawn = draw(Figure3(dimension=3, clients=(2,), fixed_clients=2), 0)
    assert (drawn.train.inputs.shape[1], drawn.validation.inputs.shape[1]) == (160, 40)


def test_more_clients_leave_the_first_ones_as_they_are_and_repetitions_differ() -> None:
    few, many = (draw(Figure3(**{**SCARCE, "fixed_clients": clients}), 3) for clients in (6, 9))
    assert torch.equal(few.train.inputs, many.train.inputs[:6])
    assert torch.equal(few.personal, many.personal[:6])
    assert not torch.equal(draw(Figure3(**SCARCE), 4).shared, many.shared)


# The claims.


@pytest.fixture(scope="module", params=["blend", "coordinates"])
def panel_b(request: pytest.FixtureRequest) -> dict[Any, dict[str, float]]:
    """Test errors less the noise, by ratio."""
    options = Figure3(**SCARCE, personal=request.param, ratios=(0, 0.3, 0.5, 0.7, 1, "mixed"), repetitions=3)
    found = scores(sweep(options), "b")
    return {ratio: {name: one.mean - options.noise**2 for name, one in row.items()} for ratio, row in found.items()}


def test_for_equal_clients_ppfe_is_as_good_as_fedavg_and_local_is_not(panel_b: Any) -> None:
    found = panel_b[0]
    assert found["PPFE"] < 1.05 * found["FedAvg"]
    assert found["PPFE"] < 0.2 * found["Local"]


def test_for_unrelated_clients_ppfe_is_about_as_good_as_local_and_fedavg_is_not(panel_b: Any) -> None:
    found = panel_b[1]
    assert found["PPFE"] < 1.15 * found["Local"]
    assert found["PPFE"] < 0.5 * found["FedAvg"]


@pytest.mark.parametrize("ratio", [0.3, 0.5, "mixed"])
def test_in_between_ppfe_is_better_than_both(panel_b: Any, ratio: float | str) -> None:
    found = panel_b[ratio]
    assert found["PPFE"] < 0.95 * min(found["Local"], found["FedAvg"])


# The command.


def test_without_a_name_the_studies_are_listed(tailor: Tailor) -> None:
    status, out, _ = tailor()
    assert status == 0
    assert all(name in out for name in STUDIES)


def test_where_there_is_no_terminal_a_study_is_one_line_to_be_searched(tailor: Tailor) -> None:
    [line] = [line for line in tailor()[1].splitlines() if "ppfe/table1" in line]
    assert recipes()["ppfe/table1"].title in line


def test_the_options_are_listed_with_their_defaults(tailor: Tailor, tmp_path: Path) -> None:
    status, out, _ = tailor("ppfe/figure3", "--options")
    assert status == 0
    assert all(key in out for key in Figure3.model_fields)
    assert not any(tmp_path.iterdir())


def test_a_study_writes_a_table_and_a_picture_and_prints_both_panels(tailor: Tailor, tmp_path: Path) -> None:
    status, out, err = tailor("ppfe/figure3", *QUICK, "ratios=[0,1,mixed]", "fixed_ratio=0.25")
    assert status == 0
    folder = tmp_path / "runs/ppfe-figure3"
    assert sorted(path.name for path in folder.iterdir()) == ["figure3.csv", "figure3.png", "options.yaml"]
    assert (folder / "figure3.png").read_bytes().startswith(b"\x89PNG")
    with (folder / "figure3.csv").open() as file:
        rows = list(csv.DictReader(file))
    points = {(row["panel"], row["clients"], row["ratio"]) for row in rows}
    assert points == {("a", "3", "0.25"), ("a", "5", "0.25"), ("b", "4", "0"), ("b", "4", "1"), ("b", "4", "mixed")}
    assert len(rows) == len(points) * 2 * len(METHODS)
    found = [float(row["test_mse"]) for row in rows if row["ratio"] == "mixed" and row["method"] == "PPFE"]
    assert f"{sum(found) / 2:.4f} ± " in out
    assert max(map(len, out.splitlines())) <= 80
    assert "results: runs/ppfe-figure3/figure3.csv" in out
    assert "ppfe/figure3: 10 of 10" in err


def test_the_stored_options_and_the_seed_give_the_same_table_again(tailor: Tailor, tmp_path: Path) -> None:
    for name, seed, threads in (("one", 5, 1), ("two", 5, 2), ("other", 6, 1)):
        torch.set_num_threads(threads)
        assert tailor("ppfe/figure3", *QUICK, f"seed={seed}", "--out", name)[0] == 0
        torch.set_num_threads(1)
    one, two, other = ((tmp_path / name / "figure3.csv").read_text() for name in ("one", "two", "other"))
    assert one == two != other
    stored = yaml.safe_load((tmp_path / "one/options.yaml").read_text())
    assert sweep(Figure3(**{key: value for key, value in stored.items() if key != "study"})) == sweep(
        Figure3(**SMALLEST, seed=5)
    )


def test_a_study_that_is_there_needs_force_and_other_folders_are_safe(tailor: Tailor, tmp_path: Path) -> None:
    assert tailor("ppfe/figure3", *QUICK, "--out", "study")[0] == 0
    assert "study exists" in tailor("ppfe/figure3", *QUICK, "--out", "study")[2]
    before = (tmp_path / "study/figure3.csv").read_text()
    assert tailor("ppfe/figure3", *QUICK, "seed=1", "--out", "study", "--force")[0] == 0
    assert (tmp_path / "study/figure3.csv").read_text() != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/figure3.csv").write_text("precious")
    status, _, err = tailor("ppfe/figure3", *QUICK, "--out", "mine", "--force")
    assert (status, (tmp_path / "mine/figure3.csv").read_text()) == (2, "precious")
    assert "mine holds no study" in err


def test_a_quiet_study_prints_only_its_result(tailor: Tailor) -> None:
    status, out, err = tailor("ppfe/figure3", *QUICK, "-q")
    assert (status, err) == (0, "")
    assert "panel a" in out


def test_without_matplotlib_there_is_a_table_and_a_line(tailor: Tailor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = tailor("ppfe/figure3", *QUICK, "--out", "study")
    assert status == 0
    assert "results: study/figure3.csv" in out
    assert "no picture: drawing a picture needs the package matplotlib" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("nope", "unknown study 'nope'; allowed: ppfe/figure3"),
        ("ppfe/figure3 sead=1", "unknown key 'sead' for ppfe/figure3; did you mean seed?"),
        ("ppfe/figure3 word", "'word' is not a setting"),
        ("ppfe/figure3 clients=20", "clients=20: input should be a list"),
        ("ppfe/figure3 clients=[20,10]", "clients=[20, 10]: allowed: each value once, from small to large"),
        ("ppfe/figure3 clients=[]", "clients=[]: allowed: a list of at least 1 item"),
        ("ppfe/figure3 ratios=[0,2]", "ratios=[0, 2]: input should be less than or equal to 1"),
        ("ppfe/figure3 ratios=[mixed,1]", "mixed last"),
        ("ppfe/figure3 dimension=0 decay=2", "dimension=0: input should be greater than or equal to 1; decay=2: "),
        ("ppfe/figure3 dimension=100000", "too large; allowed: fewer"),
        ("ppfe/figure3 samples=4", "samples=4"),
        ("ppfe/figure3 noise=.inf", "noise=inf: input should be a finite number"),
        ("ppfe/figure3 penalties=[0,1]", "penalties=[0, 1]: input should be greater than 0"),
        ("ppfe/figure3 variances=[2,1]", "variances=[2, 1]: allowed: two numbers"),
        ("ppfe/figure3 alphas=[1]", "alphas=[1]: a value is missing"),
        ("ppfe/figure3 personal=all", "personal=all: input should be 'blend' or 'coordinates'"),
        ("ppfe/figure3 --out file/study", "file is not a folder"),
        ("ppfe/figure3 --out file", "file exists"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tailor: Tailor, tmp_path: Path, arguments: str, named: str
) -> None:
    (tmp_path / "file").write_text("x")
    status, _, err = tailor(*arguments.split())
    assert status == 2
    assert err.startswith("tailor: ")
    assert err.count("\n") == 1
    assert named in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(UserError, match=r"unknown key 'odd'.*; seed=-1: .*"):
        read_options("ppfe/figure3", {"odd": 1, "seed": -1})


def test_an_error_in_one_repetition_ends_the_study() -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("show")

    with pytest.raises(RuntimeError, match="show"):
        sweep(Figure3(**SMALLEST), fail)
