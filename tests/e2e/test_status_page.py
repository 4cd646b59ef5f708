"""The status page in a real browser: needs Chromium and the package playwright."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import LetGo, Stack, wait_for_workers
from tests.e2e.lab import image, words
from tests.e2e.processes import HttpServer, Process, start_frontend, start_worker, worker_pid
from tests.pictures import data_uri, picture

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs a browser: pip install playwright"
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install Chromium")

ADMIN = "an admin's key"
WAIT_MS = 120_000


@dataclass(frozen=True)
class Watched:
    """A frontend that wants keys, and a worker of its own that a test may kill."""

    frontend: HttpServer
    doomed: Process
    cards: Path

    def ask(self, name: str) -> str:
        """A request about a picture; its id."""
        content = [image(data_uri(picture(name))), words("What is that?")]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        }
        key = {"Authorization": "Bearer a user's key"}
        answer = httpx.post(
            f"{self.frontend.url}/v1/chat/completions", json=body, headers=key, timeout=120
        )
        answer.raise_for_status()
        return str(answer.json()["id"])


@pytest.fixture(scope="module")
def watched(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    for name, key in (("users", "a user's key"), ("admins", ADMIN)):
        (directory / name).write_text(key)
        (directory / name).chmod(0o600)
    cards = directory / "cards"
    with ExitStack() as leaving:
        doomed = start_worker("doomed", stack.model, cards, directory)
        leaving.callback(let_go, doomed)
        frontend = start_frontend(
            "watched", cards, directory,
            f"--admin-key-file={directory / 'admins'}", f"--api-key-file={directory / 'users'}",
        )  # fmt: skip
        leaving.callback(let_go, frontend)
        wait_for_workers(frontend, [doomed], {"Authorization": f"Bearer {ADMIN}"})
        yield Watched(frontend, doomed, cards)


@pytest.fixture
def page(watched: Watched) -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = browser.new_page(viewport={"width": 420, "height": 800})  # a narrow screen
        problems: list[str] = []
        made.on("pageerror", lambda error: problems.append(str(error)))
        made.set_default_timeout(WAIT_MS)
        made.goto(f"{watched.frontend.url}/status")
        yield made
        browser.close()
        assert not problems


def show_key(page: Any, key: str) -> None:
    page.fill("#key", key)
    page.keyboard.press("Enter")


def test_without_a_key_of_an_admin_it_shows_nothing(watched: Watched, page: Any) -> None:
    watched.ask("hidden")
    for key in (None, "wrong", "a user's key"):
        if key is not None:
            show_key(page, key)
        page.wait_for_selector("#state.bad")
        assert "--admin-key-file" in page.inner_text("#state")
        assert page.is_hidden("#content")
        assert "doomed" not in page.content()


def test_it_follows_what_happens_and_a_killed_worker_turns_red(watched: Watched, page: Any) -> None:
    watched.ask("seen before")
    show_key(page, ADMIN)
    page.wait_for_selector("tr[data-worker=doomed] .good")
    page.wait_for_selector("#decisions details")
    asked = watched.ask("seen before")
    page.click(f"details[data-request={asked}] summary")
    page.wait_for_selector(f"text={asked}")
    assert page.is_visible("#decisions tr.chosen .bar")
    costs = page.locator("#decisions tr.chosen .bar i").evaluate_all(
        "parts => parts.map(part => part.className)"
    )
    assert costs == ["prefill", "encode", "ship", "load", "decode", "queue"]
    page.wait_for_selector(f"details[data-request={asked}] summary:text('first token')")
    assert page.locator("#plots figure").count() == 4
    # It fits a narrow screen.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    page.click("button[aria-label='drain doomed']")
    page.wait_for_selector("tr[data-worker=doomed] .warn:text('drained')")
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        watched.ask("nobody is left")
    page.click("button[aria-label='reinstate doomed']")
    page.wait_for_selector("tr[data-worker=doomed] .good:text('closed')")
    watched.ask("seen before")
    page.click("button[aria-label='pause doomed']")
    page.wait_for_selector("tr[data-worker=doomed] .warn:text('paused')")
    page.click("button[aria-label='resume doomed']")
    page.wait_for_selector("tr[data-worker=doomed] .good:text('closed')")
    page.click("button[aria-label='sleep doomed']")
    page.wait_for_selector("#state.bad:text('--enable-sleep-mode')")
    # What was before a page is opened is on it.
    page.wait_for_selector("#plots polyline[points*=',']")
    page.reload()
    page.wait_for_selector("#plots polyline[points*=',']")

    os.kill(worker_pid(watched.cards, "doomed"), signal.SIGKILL)
    page.wait_for_selector("#state.bad, tr[data-worker=doomed] .bad")
    # A key that is taken back takes what was shown along.
    show_key(page, "wrong")
    page.wait_for_selector("#content", state="hidden")
    assert "doomed" not in page.content()
