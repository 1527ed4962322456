"""Makes the pictures of pages in the documentation: trains the README's demo and opens it in headless Chromium."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

IMAGES = Path(__file__).parent / "images"
DEMO = "compare local fedavg fedavg-ft fedper data=digits clients=20 evaluate_every=2 --out runs/demo"
OTHERS = (
    "sweep fedper personal_layers=1,2 lr=0.01,0.03 data=digits clients=20 rounds=10 --out runs/sweep",
    "run ditto data=digits clients=20 rounds=10 --out runs/ditto",
)
TAILOR = (sys.executable, "-m", "tailorfl")


def chromium() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(option)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit("the page did not become ready")
        time.sleep(0.1)


def shoot(browser: webdriver.Chrome, address: str, width: int, height: int, path: Path) -> None:
    browser.set_window_size(width, height)
    browser.get(address)
    until(lambda: browser.execute_script("return document.body.dataset.ready"))
    time.sleep(2.0)  # plots are drawn when they come into view
    browser.save_screenshot(str(path))
    print(path)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for command in (DEMO, *OTHERS):
            subprocess.run([*TAILOR, *command.split(), "--quiet"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        serve = [*TAILOR, "serve", "runs", "--port", "0"]
        browser, server = chromium(), subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            shoot(browser, (Path(folder) / "runs/demo/report.html").as_uri(), 1280, 1330, IMAGES / "report.png")
            shoot(browser, address, 1280, 800, IMAGES / "serve.png")
        finally:
            server.terminate()
            browser.quit()


if __name__ == "__main__":
    main()
