"""Pages in a real browser: they open without an error, plots are there, tables sort, live curves grow."""

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium")
pytest.importorskip("plotly", reason="needs the extra report")
from report_runs import round_line, write_run
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tailorfl.report.page import write_page
from tailorfl.report.results import read_results
from tailorfl.report.serve import serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
PATIENCE = 30.0

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three methods, two of them with seeds."""
    folder = tmp_path_factory.mktemp("comparison")
    for place, (method, seeds) in enumerate({"fedavg": 1, "fedper": 2, "ditto": 2}.items()):
        for seed in range(seeds):
            write_run(folder / method / f"seed-{seed}", method, seed, rounds=12, accuracy=0.4 + 0.1 * place)
    write_page(read_results([folder]), folder / "report.html")
    return folder / "report.html"


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    return pytest.fail(f"not within {PATIENCE} s: {what}")


def open_page(browser: Any, address: str) -> None:
    browser.get_log("browser")  # what pages before it said
    browser.get(address)
    until(lambda: browser.execute_script("return document.body.dataset.ready"), "the page is ready")


def complaints(browser: Any) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]


def draw_all(browser: Any) -> list[dict[str, Any]]:
    """Scroll past every plot, and tell what each shows."""
    script = "document.querySelectorAll('.plot').forEach((one) => draw(cards.get(one.id)))"
    browser.execute_script(script)
    return browser.execute_script(
        """return [...document.querySelectorAll(".plot")].map((one) => ({
             id: one.id, traces: one.querySelector(".canvas").data.map((t) => [t.type, (t.x || []).length]),
             drawn: one.querySelectorAll("svg .trace, svg .heatmaplayer image, svg .points path").length,
             height: one.querySelector(".main-svg").getBoundingClientRect().height}))"""
    )


def column(browser: Any, table: str, place: int = 0) -> list[str]:
    rows = "[...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
    script = f"return {rows}.map((row) => row.cells[arguments[1]].textContent)"
    found: list[str] = browser.execute_script(script, table, place)
    return found


def test_a_finished_comparison_opens_without_an_error_and_shows_its_plots(browser: Any, comparison: Path) -> None:
    open_page(browser, comparison.as_uri())
    plots = draw_all(browser)
    assert {"plot-accuracy", "plot-clients", "plot-traffic", "plot-time", "plot-personalization"} <= {
        one["id"] for one in plots
    }
    for one in plots:
        assert one["traces"]
        assert one["drawn"], one["id"]
        assert one["height"] > 200
    assert complaints(browser) == []


def test_plots_are_drawn_when_they_come_into_view(browser: Any, comparison: Path) -> None:
    open_page(browser, comparison.as_uri())
    last = "[...document.querySelectorAll('.plot')].at(-1)"
    until(lambda: browser.execute_script("return document.querySelector('#plot-accuracy .main-svg')"), "the first")
    assert not browser.execute_script(f"return {last}.querySelector('.main-svg')")
    browser.execute_script(f"{last}.scrollIntoView()")
    until(lambda: browser.execute_script(f"return {last}.querySelector('.main-svg')"), "the last is drawn")


def test_twenty_entries_are_told_apart_as_dots_as_lines_and_as_bars(browser: Any, comparison: Path) -> None:
    open_page(browser, comparison.as_uri())
    for look in ("sign", "stroke", "hatch"):
        script = f"return Array.from({{ length: 20 }}, (_, place) => style(place).colour + style(place).{look})"
        assert len(set(browser.execute_script(script))) == 20


def test_a_dot_of_several_clients_is_larger_and_says_how_many(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=2, clients=2)
    rows = (run / "clients.csv").read_text().splitlines()
    (run / "clients.csv").write_text("\n".join([*rows, rows[1].replace("c0", "c2"), rows[1].replace("c0", "c3"), ""]))
    write_page(read_results([run]), tmp_path / "report.html")
    open_page(browser, (tmp_path / "report.html").as_uri())
    draw_all(browser)
    trace = "document.querySelector('#plot-personalization .canvas').data[0]"
    assert browser.execute_script(f"return {trace}.text") == ["3 clients", "c1"]
    large, small = browser.execute_script(f"return {trace}.marker.size")
    assert large == pytest.approx(small * 3**0.5)


def test_a_click_on_a_head_sorts_and_another_turns_the_order(browser: Any, comparison: Path) -> None:
    open_page(browser, comparison.as_uri())
    assert column(browser, "summary") == ["ditto", "fedavg", "fedper"]
    heads = browser.find_elements("css selector", "#summary thead button")
    [accuracy] = [head for head in heads if head.text == "personalized"]
    accuracy.click()
    assert column(browser, "summary") == ["ditto", "fedper", "fedavg"]
    accuracy.click()
    assert column(browser, "summary") == ["fedavg", "fedper", "ditto"]
    heads[0].click()
    assert column(browser, "summary") == ["ditto", "fedavg", "fedper"]
    assert (
        browser.execute_script("return document.querySelector('#summary th').getAttribute('aria-sort')") == "ascending"
    )


def test_numbers_are_sorted_as_numbers_and_what_is_missing_stays_last(browser: Any, tmp_path: Path) -> None:
    for clients, method in ((2, "a"), (10, "b")):
        write_run(tmp_path / method, "fedavg", clients=clients, rounds=2, lr=clients, finished=method == "a")
    write_page(read_results([tmp_path]), tmp_path / "report.html")
    open_page(browser, (tmp_path / "report.html").as_uri())
    heads = browser.find_elements("css selector", "#summary thead button")
    [shared] = [one for one in heads if one.text == "shared, parameters"]
    for _ in range(2):
        shared.click()
        assert column(browser, "summary", 0)[-1].endswith("lr=10")


def test_dark_and_light_follow_the_system_and_the_button(browser: Any, comparison: Path) -> None:
    def ground() -> str:
        return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

    def system(scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    system("light")
    open_page(browser, comparison.as_uri())
    assert ground() == "rgb(255, 255, 255)"
    system("dark")
    until(lambda: ground() == "rgb(20, 23, 27)", "dark")
    until(lambda: "232, 235, 239" in _ink(browser), "the plot's text is light")
    browser.find_element("id", "theme").click()
    assert ground() == "rgb(255, 255, 255)"
    browser.execute_script("localStorage.clear()")


def _ink(browser: Any) -> str:
    script = "return getComputedStyle(document.querySelector('#plot-accuracy .xtitle') || document.body).fill"
    return str(browser.execute_script(script))


def test_names_are_text_and_never_markup(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hurt=1></script><b>&amp;"
    run = write_run(tmp_path / "run", "fedavg", rounds=2, class_names=[evil])
    rows = (run / "clients.csv").read_text().replace("c0,", f'"{evil}",')
    (run / "clients.csv").write_text(rows)
    write_page(read_results([run], evil), tmp_path / "report.html")
    open_page(browser, (tmp_path / "report.html").as_uri())
    draw_all(browser)
    assert browser.execute_script("return window.hurt") is None
    assert browser.execute_script("return document.querySelector('h1').textContent") == evil
    assert evil in column(browser, "clients")
    assert complaints(browser) == []


def begin_to_print(browser: Any) -> None:
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    drawn = (
        "document.querySelectorAll('.plot').length === document.querySelectorAll('.plot .main-svg:first-child').length"
    )
    until(lambda: browser.execute_script(f"return {drawn}"), "all are drawn")


def test_on_paper_all_plots_are_drawn_dark_on_white(browser: Any, comparison: Path) -> None:
    open_page(browser, comparison.as_uri())
    begin_to_print(browser)
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"
    heads = "return [...document.querySelectorAll('#summary th')].map((one) => one.innerText.length)"
    widths = "return [...document.querySelectorAll('.plot .main-svg')].map((one) => one.getBoundingClientRect().width)"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown, wide = browser.execute_script(heads), browser.execute_script(widths)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert min(shown) > 0
    assert max(wide) < 330  # half of a sheet
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    until(lambda: min(browser.execute_script(widths)) > 400, "all are as wide as before")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of twelve settings of a method that has validation data, each on 90 clients."""
    folder = tmp_path_factory.mktemp("swept")
    for layers in (1, 2, 3):
        for lr in (0.003, 0.01, 0.03, 0.1):
            run = write_run(folder / f"{layers}-{lr}/seed-0", "fedper", clients=90, personal_layers=layers, lr=lr)
            summary = json.loads((run / "summary.json").read_text())
            (run / "summary.json").write_text(json.dumps({**summary, "validation_accuracy": 0.5}))
            rows = [f"c{client},{label},{client * label % 7}\n" for client in range(90) for label in range(10)]
            (run / "classes.csv").write_text("client,class,train\n" + "".join(rows))
    (folder / "results.csv").write_text("method,personal_layers,lr,seed\nfedper,1,0.003,0\n")
    write_page(read_results([folder]), folder / "report.html")
    return folder / "report.html"


def test_the_summary_is_as_wide_as_the_page_also_with_validation_data(browser: Any, swept: Path) -> None:
    open_page(browser, swept.as_uri())
    inside = "const box = document.getElementById('summary'); return [box.scrollWidth, box.clientWidth]"
    needed, there = browser.execute_script(inside)
    assert needed <= there


def test_names_of_plots_do_not_overlap_on_paper_and_legends_show_all(browser: Any, swept: Path) -> None:
    open_page(browser, swept.as_uri())
    begin_to_print(browser)
    for plot in ("classes", "time"):
        ticks = f"[...document.querySelectorAll('#plot-{plot} .xtick text')].map((one) => one.getBoundingClientRect())"
        boxes = browser.execute_script(f"return {ticks}.map((box) => [box.left, box.right])")
        assert len(boxes) >= 6
        assert all(left >= right - 1 for (_, right), (left, _) in itertools.pairwise(boxes)), plot
    hidden = "return document.querySelectorAll('.plot .legend .scrollbar[height]:not([height=\"0\"])').length"
    assert browser.execute_script(hidden) == 0
    browser.execute_script("dispatchEvent(new Event('afterprint'))")


def test_complete_configurations_are_open_on_paper_alone(browser: Any, comparison: Path) -> None:
    open_page(browser, comparison.as_uri())
    opened = "return [...document.querySelectorAll('details')].map((one) => one.open)"
    assert browser.execute_script(opened) == [False] * 3
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(opened) == [True] * 3
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(opened) == [False] * 3


def test_lines_that_are_all_at_one_value_have_an_axis_around_it(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=3)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    (run / "rounds.jsonl").write_text("".join(json.dumps({**line, "loss": 0.02}) + "\n" for line in lines))
    write_page(read_results([run]), tmp_path / "report.html")
    open_page(browser, (tmp_path / "report.html").as_uri())
    draw_all(browser)
    axis = "return document.querySelector('#plot-training-loss .canvas')._fullLayout.yaxis.range"
    assert browser.execute_script(axis) == pytest.approx([0.019, 0.021])


def test_on_paper_plots_of_many_long_names_keep_their_height(browser: Any, tmp_path: Path) -> None:
    for number, lr in enumerate((0.01, 0.02, 0.03, 0.04, 0.05, 0.06)):
        write_run(tmp_path / str(number), lr=lr, personal_layers_of_a_network=number)
    write_page(read_results([tmp_path]), tmp_path / "report.html")
    open_page(browser, (tmp_path / "report.html").as_uri())
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    heights = "return [...document.querySelectorAll('.plot .canvas')].map((one) => one._fullLayout?._size.h ?? 0)"
    until(lambda: min(browser.execute_script(heights)) > 60, "every plot is as high as alone")
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    until(lambda: min(browser.execute_script(heights)) > 120, "and again on the screen")


def test_a_study_with_many_columns_opens_one_panel_and_draws_others_when_they_are_opened(
    browser: Any, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name / "fedavg" / "seed-0", rounds=3)
    options = {"study": "mine/table", "column": ["one", "two"], "methods": ["fedavg"], "seeds": [0], "settings": {}}
    (tmp_path / "options.yaml").write_text(json.dumps(options))
    write_page(read_results([tmp_path]), tmp_path / "report.html")
    open_page(browser, (tmp_path / "report.html").as_uri())
    drawn = "return !!document.querySelector('#panel-two .main-svg')"
    assert not browser.execute_script(drawn)
    table = "const box = document.querySelector('#study .scroll'); return box && box.scrollHeight - box.clientHeight"
    assert not browser.execute_script(table)
    browser.find_element("css selector", "#panel-two > summary").click()
    browser.execute_script("document.querySelector('#panel-two .plot').scrollIntoView()")
    until(lambda: browser.execute_script(drawn), "the plot of the panel")
    assert complaints(browser) == []


@pytest.fixture
def served(tmp_path: Path) -> tuple[Path, str]:
    pytest.importorskip("starlette", reason="needs the extra serve")
    root, address, ready = tmp_path / "runs", list[str](), threading.Event()
    root.mkdir()

    def told(url: str) -> None:
        address.append(url)
        ready.set()

    threading.Thread(target=serve, args=(root, "127.0.0.1", 0, told), daemon=True).start()
    assert ready.wait(PATIENCE)
    return root, address[0]


def test_a_live_run_is_listed_and_its_curve_grows_until_it_ends(browser: Any, served: tuple[Path, str]) -> None:
    root, address = served
    browser.get_log("browser")
    browser.get(address)
    until(lambda: "no run here yet" in browser.find_element("tag name", "main").text, "an empty list")
    run = write_run(root / "live", "fedper", rounds=2, planned=4, finished=False)
    until(lambda: column(browser, "runs") == [" live"], "the run is listed")
    browser.find_element("link text", "live").click()
    points = (
        "return document.querySelector('#plot-accuracy .canvas')?.data?.at(-2)?.x.length"  # personalized, then global
    )

    def shown() -> int:
        return int(browser.execute_script(points) or 0)

    until(lambda: shown() == 2, "two points")
    assert "round 2 of 4" in browser.find_element("id", "progress").text
    with (run / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(round_line(3, 0.5)) + "\n")
    until(lambda: shown() == 3, "the curve has grown")
    assert "round 3 of 4" in browser.find_element("id", "progress").text
    write_run(run, "fedper", rounds=4)
    until(lambda: shown() == 4 and not browser.find_elements("id", "progress"), "the end")
    assert complaints(browser) == []


def grown(browser: Any, said: str) -> None:
    until(lambda: said in browser.find_element("tag name", "main").text, said)


def test_who_is_in_a_page_by_keyboard_stays_there_while_it_grows(browser: Any, served: tuple[Path, str]) -> None:
    root, address = served
    for seed in (0, 1):
        write_run(root / "cmp/fedavg" / f"seed-{seed}", "fedavg", seed, rounds=2)
    (root / "cmp/results.csv").write_text("method,seed\nfedavg,0\nfedavg,1\n")
    live = write_run(root / "cmp/live", "fedper", rounds=1, planned=90, finished=False)
    done = 1

    def stays(page: str, elements: str, ready: str) -> None:
        """Each of these elements keeps the keyboard when the page is drawn again."""
        nonlocal done
        open_page(browser, f"{address}{page}")
        until(lambda: browser.execute_script(ready), "what is looked for")
        every = browser.execute_script(f"return document.querySelectorAll('{elements}').length")
        assert every >= 2
        for place in range(every):
            browser.execute_script(f"document.querySelectorAll('{elements}')[{place}].focus()")
            done += 1
            with (live / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(round_line(done, 0.5)) + "\n")
            grown(browser, f"{done} of 90")
            where = f"return [...document.querySelectorAll('{elements}')].indexOf(document.activeElement)"
            assert browser.execute_script(where) == place

    stays("", ".scroll, th:nth-child(3) button", "return true")
    stays(
        "view?run=cmp",
        ".command button, #plot-accuracy button",
        "return document.querySelector('#plot-accuracy button')",
    )
    assert complaints(browser) == []


def test_who_is_in_the_list_by_keyboard_stays_there_while_runs_go_on(browser: Any, served: tuple[Path, str]) -> None:
    root, address = served
    for number in range(40):
        write_run(root / f"run{number:02}", "fedavg", rounds=2)
    live = write_run(root / "live", "fedper", rounds=1, planned=3, finished=False)
    open_page(browser, address)
    box = browser.find_element("css selector", "#runs input[aria-label='pick run39']")
    browser.execute_script("arguments[0].focus()", box)
    where = "return [document.activeElement.getAttribute('aria-label'), document.getElementById('runs').scrollTop]"
    before = browser.execute_script(where)
    assert before[1] > 0
    with (live / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(round_line(2, 0.5)) + "\n")
    until(lambda: "2 of 3" in browser.find_element("id", "runs").text, "the next round")
    assert browser.execute_script(where) == before
    browser.execute_script("document.activeElement.click()")
    browser.find_element("css selector", ".tools button").click()
    until(lambda: "view" in browser.current_url, "the view")
    browser.back()
    until(lambda: "show 1 side" in browser.find_element("css selector", ".tools button").text, "what was picked")
    assert complaints(browser) == []


def test_on_a_narrow_screen_names_stay_in_sight_and_words_are_whole(browser: Any, served: tuple[Path, str]) -> None:
    root, address = served
    for method in ("fedavg", "fedper"):
        write_run(root / "cmp" / method, method)
    (root / "cmp/results.csv").write_text("method,seed\nfedavg,0\nfedper,0\n")
    narrow = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    open_page(browser, address)
    lines = """const range = document.createRange();
               range.selectNodeContents(document.querySelector("#folders tbody").rows[0].cells[1]);
               return [range.toString(), range.getClientRects().length]"""
    assert browser.execute_script(lines) == ["comparison", 1]
    left = "return document.querySelector('#runs tbody').rows[0].cells[0].getBoundingClientRect().left"
    before = browser.execute_script(left)
    scroll = "const box = document.getElementById('runs'); box.scrollLeft = 200; return box.scrollLeft"
    assert browser.execute_script(scroll) == 200
    assert browser.execute_script(left) == pytest.approx(before, abs=1)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_runs_are_filtered_and_picked_to_be_seen_side_by_side(browser: Any, served: tuple[Path, str]) -> None:
    root, address = served
    for method, clients in (("fedavg", 4), ("fedper", 4), ("local", 5)):
        write_run(root / method, method, rounds=2, clients=clients)
    open_page(browser, address)
    search, state = browser.find_element("css selector", "input[type=search]"), browser.find_element("id", "state")
    assert state.text == "3 runs"
    search.send_keys("CLIENTS=5")
    assert column(browser, "runs") == [" local"]
    assert state.text == "1 of 3 runs"
    search.send_keys("0")
    assert "No run matches." in browser.find_element("tag name", "main").text
    assert state.text == "0 of 3 runs"
    search.clear()
    search.send_keys("fed digits")
    assert column(browser, "runs") == [" fedavg", " fedper"]
    for box in browser.find_elements("css selector", "#runs input"):
        box.click()
    browser.find_element("css selector", ".tools button").click()
    until(lambda: "view" in browser.current_url, "the view")
    until(lambda: column(browser, "summary") == ["fedavg", "fedper"], "both")
    assert complaints(browser) == []
