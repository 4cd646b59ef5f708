"""The status page in a real browser, over a frontend and workers that have all but engines."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.e2e.conftest import wait_for_workers
from tests.e2e.lab import image, words
from tests.e2e.processes import (
    ENGINE_FLAGS,
    SERVER_FLAGS,
    HttpServer,
    Process,
    discovery_flag,
    start_frontend,
    worker_pid,
)
from tests.pictures import data_uri, picture

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install Chromium")

SCREENSHOT = Path(__file__).parents[2] / "setup" / "screenshot.py"
ADMIN = "an admin's key"
USER = "a user's key"
WAIT_MS = 240_000
PHONE = ViewportSize(width=390, height=844)
STEADY, DOOMED = "tr[data-worker=steady]", "tr[data-worker=doomed]"


@dataclass(frozen=True)
class Watched:
    """A frontend that wants keys, and two workers, of which a test may kill one.

    Attributes:
        admins: the file with the admin's key.
    """

    frontend: HttpServer
    cards: Path
    admins: Path

    def ask(self, name: str) -> str:
        """A request about a picture; its id."""
        content = [image(data_uri(picture(name))), words("What is that?")]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        }
        headers = {"Authorization": f"Bearer {USER}"}
        url = f"{self.frontend.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=240)
        answer.raise_for_status()
        return str(answer.json()["id"])


@pytest.fixture(scope="module")
def watched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    for name, key in (("users", USER), ("admins", ADMIN)):
        (directory / name).write_text(key)
        (directory / name).chmod(0o600)
    cards = directory / "cards"
    with ExitStack() as leaving:
        workers = []
        for name in ("steady", "doomed"):
            command = [
                *(sys.executable, "-m", "tests.fakes.lettered_worker"),
                *(f"--model={model}", f"--worker-id={name}", discovery_flag(cards)),
                *(*ENGINE_FLAGS, SERVER_FLAGS[-1]),
            ]
            workers.append(Process(name, command, directory / f"{name}.log"))
            leaving.callback(workers[-1].stop)
        frontend = start_frontend(
            "watched", cards, directory,
            f"--admin-key-file={directory / 'admins'}", f"--api-key-file={directory / 'users'}",
            "--router-eject-base=3600",  # nobody comes back by himself
        )  # fmt: skip
        leaving.callback(frontend.stop)
        wait_for_workers(frontend, workers, {"Authorization": f"Bearer {ADMIN}"})
        yield Watched(frontend, cards, directory / "admins")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT_MS
        )
        yield browser
        browser.close()


Open = Callable[..., Page]


@pytest.fixture
def open_page(watched: Watched, browser: Browser) -> Iterator[Open]:
    """Opens the page as somebody who was never there, on a narrow screen."""
    problems: list[str] = []
    with ExitStack() as leaving:

        def opened(key: str = "", url: str = watched.frontend.url, **options: Any) -> Page:
            context = browser.new_context(viewport=PHONE, **options)
            leaving.callback(context.close)
            page = context.new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.set_default_timeout(WAIT_MS)
            page.goto(f"{url}/status")
            page.wait_for_selector("#state:is(.good, .warn, .bad)")
            if key:
                show_key(page, key)
                page.wait_for_selector("#content:not([hidden])")
            return page

        yield opened
    assert not problems


def show_key(page: Page, key: str) -> None:
    page.fill("#key", key)
    page.keyboard.press("Enter")


def choose(page: Page, action: str, worker: str) -> str:
    """Choose an operation of a worker; what the page says that it will do."""
    page.click(f"button[aria-label='Operations of {worker}']")
    page.click(f"dialog button[aria-label='{action} {worker}']")
    page.wait_for_selector(f"dialog h2:text('{action} {worker}?')")
    return page.inner_text("#dialog-body")


def operate(page: Page, action: str, worker: str) -> None:
    choose(page, action, worker)
    page.click("#dialog-confirm")


def color(page: Page, selector: str, which: str = "color") -> str:
    """As it is drawn."""
    script = "(element, which) => getComputedStyle(element)[which]"
    return str(page.locator(selector).first.evaluate(script, which))


def test_without_a_key_of_an_admin_it_shows_nothing(watched: Watched, open_page: Open) -> None:
    watched.ask("hidden")
    page = open_page()
    for key in (None, "wrong", USER):
        if key is not None:
            with page.expect_response("**/mmrouter/workers") as refused:
                show_key(page, key)
            assert refused.value.status in (401, 403)
        page.wait_for_selector("#state.bad:text('--admin-key-file')")
        assert page.is_hidden("#content")
        assert "doomed" not in page.content()


def test_a_key_is_asked_for_only_where_there_is_one(
    open_page: Open, tmp_path: Path, watched: Watched
) -> None:
    assert open_page().is_visible("#key-form")
    keyless = start_frontend("keyless", tmp_path / "cards", tmp_path)
    try:
        keyless.wait_for_status(200, "/livez")
        page = open_page(url=keyless.url)
        page.wait_for_selector("#state.bad:text('no worker has registered')")
        assert page.is_hidden("#key-form") and page.is_hidden("#forget-key")
        assert "Model none yet" in page.inner_text("#facts").replace("\n", " ")
    finally:
        keyless.stop()
    # A key would not help where none is set and the browser comes from elsewhere, it seems.
    page = open_page(extra_http_headers={"X-Forwarded-For": "198.51.100.1"}, key=ADMIN)
    page.click("#forget-key")
    page.wait_for_selector("#key-form:not([hidden])")


def test_it_follows_what_happens(watched: Watched, open_page: Open) -> None:
    watched.ask("seen before")
    page = open_page(ADMIN)
    for worker in (STEADY, DOOMED):
        page.wait_for_selector(f"{worker} .good:text('healthy')")
    page.wait_for_selector("#decisions tr[data-request]")
    asked = watched.ask("seen before")
    row = f"#decisions tr[data-request={asked}]"
    page.click(f"{row} button")
    page.wait_for_selector(f"#decisions p:text('{asked}')")
    page.wait_for_selector("#decisions table tr.chosen")
    costs = page.locator(f"{row} .bar").first.locator("i").evaluate_all(
        "parts => parts.map(part => part.className)"
    )  # fmt: skip
    assert costs == ["prefill", "encode", "ship", "load", "decode", "queue", "step"]
    page.wait_for_selector(f"{row} td[data-label^='First token'] :text('ms')")
    page.click("#media summary")
    page.wait_for_selector("#media-facts dd:text('lease')")
    # What was before a page is opened is on it.
    page.wait_for_selector("#plots polyline[points*=',']")
    page.reload()
    page.wait_for_selector("#plots polyline[points*=',']")
    # A key that is forgotten takes what was shown along.
    page.click("#forget-key")
    page.wait_for_selector("#content", state="hidden")
    assert "doomed" not in page.content()
    assert "GET /mmrouter" not in watched.frontend.log.read_text(), "polls are not logged"


def test_its_head_says_whether_all_is_well(watched: Watched, open_page: Open) -> None:
    watched.ask("for the head")
    page = open_page(ADMIN)
    page.wait_for_selector("#state.good:text('all 2 workers take requests')")
    facts = page.inner_text("#facts").replace("\n", " ")
    for fact in ("Model demo", "Version mmrouter", "(vLLM 0.", "Frontend ", "Routing kv", "Up "):
        assert fact in facts
    plots = [
        "Requests per second", "Errors in 10 s", "First token", "Tokens per second",
        "Prefix cache hits",
    ]  # fmt: skip
    assert page.locator("#plots figcaption span").all_inner_texts() == plots
    assert page.locator("#plots figure .axis span").all_inner_texts()[:4] == [
        "15 min ago", "10", "5", "now",
    ]  # fmt: skip
    assert page.locator("#plots figure:last-of-type .scale span").all_inner_texts() == [
        "100 %", "50 %", "0 %",
    ]  # fmt: skip
    page.wait_for_selector("#plots strong:text('p50')")
    headers = {"Authorization": f"Bearer {USER}"}
    url = f"{watched.frontend.url}/v1/chat/completions"
    assert httpx.post(url, json={"model": "demo"}, headers=headers).status_code == 400
    page.wait_for_selector("#plots .lines :text('other 4xx: 1')")


def test_nothing_is_wider_than_a_phone(watched: Watched, open_page: Open) -> None:
    for number in range(12):
        watched.ask(f"on a phone {number % 3}")
    page = open_page(ADMIN)
    page.click("#more-decisions")
    page.locator("#decisions button:text('more')").first.click()
    page.wait_for_selector("#decisions table tr.chosen")
    page.click("#media summary")
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(fits)
    for button in page.locator("main button:visible, main summary").all():
        box = button.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    choose(page, "drain", "steady")
    box = page.locator("dialog").bounding_box()
    assert page.evaluate(fits) and box is not None and box["width"] < PHONE["width"]


def test_workers_are_managed_with_a_confirmation(watched: Watched, open_page: Open) -> None:
    page = open_page(ADMIN)
    assert "no new requests" in choose(page, "drain", "steady")
    page.click("#dialog-cancel")
    watched.ask("nothing was done")
    assert page.is_visible(f"{STEADY} .good:text('healthy')")
    for worker in ("steady", "doomed"):
        last = "clients will get 503" in choose(page, "drain", worker)
        assert last == (worker == "doomed")
        page.click("#dialog-confirm")
        page.wait_for_selector(f"tr[data-worker={worker}] .warn:text('drained')")
    page.wait_for_selector("#state.bad:text('clients get 503')")
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        watched.ask("nobody is left")
    operate(page, "reinstate", "steady")
    page.wait_for_selector(f"{STEADY} .good:text('healthy')")
    watched.ask("somebody is")
    operate(page, "reinstate", "doomed")
    page.wait_for_selector(f"{DOOMED} .good:text('healthy')")

    operate(page, "eject", "doomed")
    page.wait_for_selector(f"{DOOMED} .bad:text('ejected until')")
    operate(page, "reinstate", "doomed")
    page.wait_for_selector(f"{DOOMED} .good:text('healthy')")

    operate(page, "pause", "doomed")
    page.wait_for_selector(f"{DOOMED} .warn:text('paused')")
    operate(page, "resume", "doomed")
    page.wait_for_selector(f"{DOOMED} .good:text('healthy')")
    operate(page, "sleep", "doomed")
    page.wait_for_selector("#done.bad:text('--enable-sleep-mode')")
    page.click("#more-events")
    for what in ("drained", "ejected", "reinstated", "joined"):
        page.wait_for_selector(f"#events :text('{what}')")


def test_it_needs_no_mouse(open_page: Open) -> None:
    page = open_page()
    tab_to(page, "element => element.id === 'key'")
    page.keyboard.type(ADMIN)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{STEADY} .good:text('healthy')")
    for action, told in (
        ("drain", ".warn:text('drained')"), ("reinstate", ".good:text('healthy')"),
    ):  # fmt: skip
        for label in ("Operations of steady", f"{action} steady"):
            tab_to(page, f"element => element.getAttribute('aria-label') === {label!r}")
            ring = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(ring) == "solid", "one sees where one is"
            page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "dialog-cancel"
        tab_to(page, "element => element.id === 'dialog-confirm'")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{STEADY} {told}")


def tab_to(page: Page, wanted: str) -> None:
    for _ in range(200):
        if page.evaluate(f"({wanted})(document.activeElement)"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the Tab key never comes to {wanted}")


def test_it_is_light_or_dark_as_its_reader_wants(open_page: Open) -> None:
    page = open_page(ADMIN, color_scheme="light")
    page.wait_for_selector(f"{STEADY} .good")
    drawn = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ground, ink = color(page, "body", "backgroundColor"), color(page, "body")
        drawn.append((ground, ink, color(page, f"{STEADY} .good")))
        paper, text = brightness(ground), brightness(ink)
        assert (paper > text) == (scheme == "light") and abs(paper - text) > 150
    assert all(light != dark for light, dark in zip(*drawn, strict=True))


def brightness(drawn: str) -> float:
    """From 0 to 255, of a color as a browser computes it."""
    red, green, blue = map(int, re.findall(r"\d+", drawn)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_its_picture_for_the_docs_is_made_by_a_script(watched: Watched, tmp_path: Path) -> None:
    watched.ask("for a picture")
    png = tmp_path / "made" / "status.png"
    refused = screenshot(watched, png)
    assert refused.returncode == 1 and "--admin-key-file" in refused.stderr.splitlines()[-1]
    assert not png.exists()
    done = screenshot(watched, png, f"--admin-key-file={watched.admins}", "--dark")
    assert done.returncode == 0, done.stderr
    with Image.open(png) as taken:
        assert (taken.format, taken.size) == ("PNG", (1180, 1150))
        drawn = taken.convert("RGB").getcolors(maxcolors=1 << 20)
    assert drawn is not None and len(drawn) > 20, "there is something on it"


def screenshot(watched: Watched, png: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCREENSHOT), watched.frontend.url, str(png), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)


def test_a_killed_worker_turns_red_and_stays(watched: Watched, open_page: Open) -> None:
    page = open_page(ADMIN)
    page.wait_for_selector(f"{DOOMED} .good:text('healthy')")
    good = color(page, f"{DOOMED} .good")
    os.kill(worker_pid(watched.cards, "doomed"), signal.SIGKILL)
    page.wait_for_selector(f"{DOOMED} .bad:text('lost')")
    red = color(page, f"{DOOMED} .bad")
    assert red != good
    red_part, green_part, blue_part = map(int, re.findall(r"\d+", red)[:3])
    assert red_part > 2 * max(green_part, blue_part)
    watched.ask("somebody is left")
    # Once its card is gone nothing can be done with it, and the page still says what became of it.
    page.wait_for_selector(f"{DOOMED}:not(:has(button)) .bad:text-matches('lost .* ago: ')")
    page.wait_for_selector("#state.warn:text('1 worker of 2 take requests (doomed was lost')")
    page.wait_for_selector("#events .bad:text('lost')")
