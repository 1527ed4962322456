"""The server of runs: what it shows, to whom, and what it never gives away."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("plotly", reason="needs the extra report")
from report_runs import write_run
from starlette.testclient import TestClient

from tailorfl.cli import main
from tailorfl.data.occupied import occupied
from tailorfl.report import listing
from tailorfl.report.serve import make_app

HOME = "http://127.0.0.1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs of a comparison and one by itself, and files beside them that are nobody's business."""
    folder = tmp_path / "runs"
    write_run(folder / "cmp" / "fedavg", method="fedavg", rounds=3)
    write_run(folder / "cmp" / "fedper", method="fedper", rounds=3)
    write_run(folder / "alone", method="local", rounds=2)
    (folder / "secret.txt").write_text("secret")
    write_run(tmp_path / "outside", method="fedavg", rounds=1)
    return folder


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(make_app(root), base_url=HOME) as client:
        yield client


def names(client: TestClient, key: str = "runs") -> list[str]:
    return [row[0]["text"] for row in client.get("/runs.json").json()[key]["rows"]]


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_all_runs_are_listed_and_those_that_belong_together(client: TestClient) -> None:
    assert names(client) == ["alone", "cmp/fedavg", "cmp/fedper"]
    assert names(client, "folders") == ["cmp"]


def test_a_comparison_over_seeds_is_one_folder_and_not_one_for_each_method(client: TestClient, root: Path) -> None:
    for method in ("fedavg", "fedper"):
        for seed in (0, 1):
            write_run(root / "big" / method / f"seed-{seed}", method=method, seed=seed, rounds=1)
    (root / "big" / "results.csv").write_text("method,seed\nfedavg,0\n")
    assert names(client, "folders") == ["big", "cmp"]


def test_runs_are_shown_alone_together_and_by_their_folder(client: TestClient) -> None:
    def shown(query: str) -> list[str]:
        [panel] = client.get(f"/data.json?{query}").json()["panels"]
        [summary] = [table for table in panel["tables"] if table["key"] == "summary"]
        return [row[0]["text"] for row in summary["rows"]]

    assert shown("run=alone") == ["local"]
    assert shown("run=cmp") == ["fedavg", "fedper"]
    assert shown("run=alone&run=cmp/fedper") == ["local", "fedper"]


def test_pages_load_nothing_from_elsewhere_and_say_so(client: TestClient) -> None:
    for address in ("/", "/view?run=alone"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "http://" not in answer.text
        assert "https://" not in answer.text
    assert "Plotly" in client.get("/plotly.js").text


@pytest.mark.parametrize(
    "name",
    ["../outside", "..", "/etc", "alone/../../outside", "secret.txt", "", "cmp/link", "link", "cmp/fedavg/checkpoints"],
)
def test_nothing_but_runs_below_the_folder_is_given(name: str, root: Path, client: TestClient) -> None:
    os.symlink(root.parent / "outside", root / "link")
    os.symlink(root.parent / "outside", root / "cmp" / "link")
    for path in ("view", "data.json"):
        answer = client.get(f"/{path}", params={"run": name})
        assert answer.status_code == 404
        assert "there is no run" in answer.text


def test_files_have_no_addresses(client: TestClient) -> None:
    for path in ("/secret.txt", "/alone/config.yaml", "/runs/alone/config.yaml", "/..%2foutside/config.yaml"):
        assert client.get(path).status_code == 404


def test_only_reading_is_possible_and_changes_nothing(root: Path, client: TestClient) -> None:
    before = files_of(root)
    for path in ("/", "/runs.json", "/view?run=alone", "/data.json?run=cmp", "/plotly.js"):
        assert client.get(path).status_code == 200
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client.request(method, path).status_code == 405
    assert files_of(root) == before


def test_a_page_of_another_site_cannot_ask_by_its_own_name(client: TestClient) -> None:
    assert client.get("/runs.json", headers={"Host": "evil.example"}).status_code == 400
    for name in ("localhost:8765", "127.0.0.1", "[::1]:8765", "[::1]"):
        assert client.get("/runs.json", headers={"Host": name}).status_code == 200
    for name in ("[::2]:8765", "evil.example:127.0.0.1", "", "localhost.evil.example"):
        assert client.get("/runs.json", headers={"Host": name}).status_code == 400


def test_what_a_link_leads_to_is_not_given(root: Path, client: TestClient) -> None:
    (root.parent / "secret.txt").write_text('{"round": 1, "loss": 0.625}\nsecret\n')
    for name in ("error.txt", "rounds.jsonl", "summary.json"):
        (root / "alone" / name).unlink(missing_ok=True)
        os.symlink(root.parent / "secret.txt", root / "alone" / name)
        answers = [client.get(address) for address in ("/runs.json", "/data.json?run=alone")]
        assert answers[1].status_code == 404
        assert f"{name} is a link" in answers[1].text
        assert not any("secret\n" in answer.text or "0.625" in answer.text for answer in answers)
        (root / "alone" / name).unlink()


def test_a_study_that_cannot_be_read_does_not_keep_the_others_from_being_listed(root: Path, client: TestClient) -> None:
    options = root / "cmp/options.yaml"
    options.write_bytes(b"\xff\xfe\xfd not text")
    assert len(names(client)) == 3
    options.unlink()
    os.symlink(root.parent / "secret.txt", options)
    assert len(names(client)) == 3


def test_a_study_is_sent_again_when_what_was_chosen_of_it_changes(root: Path, client: TestClient) -> None:
    for address, file in (("/data.json?run=cmp", "options.yaml"), ("/runs.json", "results.csv")):
        tag = client.get(address).headers["etag"]
        (root / "cmp" / file).write_text("method,seed\n" if file == "results.csv" else "study: mine\n")
        assert client.get(address, headers={"If-None-Match": tag}).status_code == 200


def test_a_run_that_has_not_changed_is_not_read_again(
    root: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(names(client)) == 3
    read = list[Path]()
    monkeypatch.setattr(listing, "last_lines", lambda file: read.append(file) or [{}])
    write_run(root / "alone", method="local", rounds=4, planned=9)
    assert len(names(client)) == 3
    assert read == [root / "alone" / "rounds.jsonl"]


def test_the_last_line_of_a_run_is_found_however_long_it_is(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    for length in (0, 10, listing.LAST - 20, listing.LAST, *(k * listing.LAST // 2 for k in range(3, 20))):
        lines = [{"round": number, "diverged": "x" * length} for number in (1, 2)]
        for there in (lines, lines[1:]):
            file.write_text("".join(json.dumps(line) + "\n" for line in there) + '{"round": 3, "half')
            assert listing.last_lines(file)[-1] == lines[1]
    file.write_text("half a line")
    assert listing.last_lines(file) == [{}]


def test_what_has_not_changed_is_not_sent_again(root: Path, client: TestClient) -> None:
    for address in ("/runs.json", "/data.json?run=alone"):
        tag = client.get(address).headers["etag"]
        assert client.get(address, headers={"If-None-Match": tag}).status_code == 304
    write_run(root / "alone", method="local", rounds=4, finished=False)
    again = client.get("/data.json?run=alone", headers={"If-None-Match": tag})
    assert again.status_code == 200
    assert again.json()["progress"] == []  # its summary is there


def test_a_run_that_trains_is_shown_as_far_as_it_is(root: Path, client: TestClient) -> None:
    write_run(root / "live", method="fedper", rounds=2, planned=5, finished=False)
    data: dict[str, Any] = client.get("/data.json?run=live").json()
    [line] = data["progress"]
    assert line.startswith("fedper: round 2 of 5, training loss")
    with (root / "live" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')  # half a line
    assert client.get("/data.json?run=live").json()["progress"] == [line]
    answer = client.get("/runs.json")
    assert cells(answer, "live") == cells(answer, "live") | {"state": "stopped", "rounds": "2 of 5"}
    with occupied(root / "live"):
        training = client.get("/runs.json", headers={"If-None-Match": answer.headers["etag"]})
        assert cells(training, "live")["state"] == "training"
        assert cells(training, "alone")["state"] == "done"


def test_a_run_that_failed_is_told_from_one_that_was_stopped(root: Path, client: TestClient) -> None:
    for name in ("stopped", "failed"):
        write_run(root / name, rounds=2, planned=5, finished=False)
    (root / "failed" / "error.txt").write_text("Traceback\nRuntimeError: out of memory\n")
    answer = client.get("/runs.json")
    assert [cells(answer, name)["state"] for name in ("stopped", "failed", "alone")] == ["stopped", "failed", "done"]
    with occupied(root / "failed"):  # it is tried again
        assert cells(client.get("/runs.json"), "failed")["state"] == "training"


def test_every_setting_of_a_run_is_sent_to_find_it_by(root: Path, client: TestClient) -> None:
    write_run(root / "alone", "local", seed=1, rounds=2, network_options={"hidden": [8, 4]}, partition=None)
    settings = client.get("/runs.json").json()["settings"]
    assert {"clients=4", "data=digits"} <= set(settings["alike"])
    own = {name: set(words) for name, words in settings["own"].items()}
    assert own["alone"] > {"method=local", "seed=1", "network_options={hidden:[8,4]}", "partition=null"}
    assert own["cmp/fedper"] == {"method=fedper", "seed=0", "rounds=3"}


def test_the_list_has_the_name_of_its_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with TestClient(make_app(Path()), base_url=HOME) as client:
        assert client.get("/runs.json").json()["title"] == "Runs: runs"
        assert "<title>Runs: runs</title>" in client.get("/").text


def cells(answer: Any, name: str, key: str = "runs") -> dict[str, str]:
    """What a row of the list says, by the heads of its columns."""
    table = answer.json()[key]
    row = next(row for row in table["rows"] if row[0]["text"] == name)
    return {head["name"]: cell["text"] for head, cell in zip(table["heads"], row, strict=True)}


def test_folders_say_what_they_hold(root: Path, client: TestClient) -> None:
    (root / "cmp" / "results.csv").write_text("method,seed,data\nfedavg,0,digits\nfedper,0,digits\n")
    said = cells(client.get("/runs.json"), "cmp", "folders")
    assert list(said.values()) == ["cmp", "comparison", "fedavg, fedper", "digits", "2", ""]
    assert list(said) == ["folder", "what", "methods", "data", "runs", "last change"]
    (root / "cmp" / "results.csv").write_text("method,lr,seed,data\nfedavg,0.1,0,digits\nfedavg,0.2,0,digits\n")
    assert cells(client.get("/runs.json"), "cmp", "folders")["what"] == "sweep"
    (root / "cmp" / "results.csv").write_text('"half a table')
    assert cells(client.get("/runs.json"), "cmp", "folders")["what"] == ""


def test_a_comparison_of_which_one_run_has_begun_is_listed_as_what_was_asked_for(
    root: Path, client: TestClient
) -> None:
    write_run(root / "killed/fedavg/seed-0", finished=False)
    (root / "killed/asked.yaml").write_text("methods: [fedavg, fedper, local]\nsettings: {}\n")
    said = cells(client.get("/runs.json"), "killed", "folders")
    assert list(said.values()) == ["killed", "comparison", "fedavg, fedper, local", "digits", "1", ""]
    answer = client.get("/data.json?run=killed")
    assert answer.json()["missing"] == ["fedper, local (seed 0): not begun"]
    (root / "killed/fedper/seed-0").mkdir(parents=True)
    (root / "killed/fedper/seed-0/error.txt").write_text("it has no head")
    again = client.get("/data.json?run=killed", headers={"If-None-Match": answer.headers["ETag"]})
    assert again.json()["missing"] == ["fedper (seed 0): it has no head", "local (seed 0): not begun"]


def test_a_folder_without_a_table_says_what_its_runs_are(root: Path, client: TestClient) -> None:
    said = cells(client.get("/runs.json"), "cmp", "folders")
    assert [said[key] for key in ("what", "methods", "data")] == ["", "fedavg, fedper", "digits"]


def test_a_broken_run_is_named_and_the_others_are_shown(root: Path, client: TestClient) -> None:
    (root / "alone" / "rounds.jsonl").write_text("nonsense\n")
    answer = client.get("/data.json?run=alone")
    assert answer.status_code == 404
    assert "rounds.jsonl, line 1: not JSON" in answer.text
    assert names(client) == ["alone", "cmp/fedavg", "cmp/fedper"]
    assert client.get("/data.json?run=cmp").json()["notes"] == []
    (root / "cmp/fedper/rounds.jsonl").write_text("nonsense\n")
    [note] = client.get("/data.json?run=cmp").json()["notes"]
    assert note.startswith("left out: ")
    assert note.endswith("fedper/rounds.jsonl, line 1: not JSON; was the file changed?")


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    with TestClient(make_app(tmp_path), base_url=HOME) as client:
        assert names(client) == []


def test_the_command_refuses_what_is_no_folder_and_a_port_that_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["tailor", "serve", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    assert said(str(root / "secret.txt")).endswith("is not a folder; allowed: a folder of runs")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        why = "cannot be listened on: Address already in use; allowed: another"
        assert f"127.0.0.1:{port} {why}" in said(str(root), "--port", port)


def test_the_data_of_a_page_is_plain_json(client: TestClient) -> None:
    json.loads(client.get("/data.json?run=cmp").text, parse_constant=lambda name: pytest.fail(name))
