"""A real browser without a window: Debian's Chromium, driven by selenium. Skips its tests where there is none."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 60  # only a test that fails waits that long
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",  # else it asks its makers, at every start
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, url: str) -> None:
        """Open a page in a tab without cookies and stored data. Close the others, whose pages go on asking, and forget
        what they have asked for and written."""
        before = self.driver.window_handles
        self.driver.switch_to.new_window("tab")
        current = self.driver.current_window_handle
        for handle in before:
            self.driver.switch_to.window(handle)
            self.driver.close()
        self.driver.switch_to.window(current)
        for kind in ("performance", "browser"):
            self.driver.get_log(kind)
        self.driver.get(url)

    def find(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> WebElement:
        [found] = self.find(selector)
        return found

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.02).until(lambda _: condition())

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def look_like(self, width: int, height: int, is_dark: bool) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        colors = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colors]})

    def asked_urls(self) -> list[str]:
        """Return the URL of every request since the tab was opened, or since the last call."""
        messages = [json.loads(each["message"])["message"] for each in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Return what the page's scripts and its policy have written to the console."""
        return [each["message"] for each in self.driver.get_log("browser")]


@contextmanager
def running_browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    driver_program = shutil.which("chromedriver")
    if not program or not driver_program:
        pytest.skip("no Chromium with its driver; on Debian: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for argument in (*ARGUMENTS, f"--user-data-dir={folder}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = webdriver.Chrome(options, Service(driver_program))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
