"""Open WebUI, installed, in a browser: sign up, hello, a picture, a title."""

import atexit
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from playwright.sync_api import FilePayload, Page, TimeoutError, sync_playwright

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main
from tests.ports import free_port

case = Cases()
START_S, ANSWER_S = 240, 90


@dataclass
class Noted:
    """What Open WebUI asked: path, status and form of each request."""

    requests: list[dict[str, Any]] = field(default_factory=list)

    def take(self) -> list[dict[str, Any]]:
        taken, self.requests = self.requests, []
        if refused := [each for each in taken if each["status"] >= 400]:
            raise RuntimeError(json.dumps(refused))
        return taken


def proxy_to(url: str, noted: Noted) -> ThreadingHTTPServer:
    """Pass requests on, streams piece by piece."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            passed = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("host", "connection", "accept-encoding")
            }
            link = HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
            link.request(self.command, self.path, body or None, passed)
            reply = link.getresponse()
            asked = json.loads(body) if body.startswith(b"{") else {}
            about = {"path": self.path, "status": reply.status}
            about |= {name: asked[name] for name in ("stream", "max_tokens") if name in asked}
            about |= {"tools": len(asked.get("tools", ())), "images": body.count(b'"image_url":')}
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.getheader("Content-Type") or "")
            self.end_headers()
            said = b""
            while piece := reply.read1(65536):
                said += piece
                self.wfile.write(piece)
            if reply.status >= 400:
                about["said"] = said.decode(errors="replace")[:1000]
            noted.requests.append(about)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextmanager
def open_webui(upstream: str, key: str) -> Iterator[str]:
    """Serve it; give its address."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "DATA_DIR": folder,
            "WEBUI_SECRET_KEY": "for a test",
            "OPENAI_API_BASE_URL": f"{upstream}/v1",
            "OPENAI_API_KEY": key,
            "ENABLE_OLLAMA_API": "false",
            "OFFLINE_MODE": "true",
            "RAG_EMBEDDING_ENGINE": "openai",  # or it loads a model of its own
            "ANONYMIZED_TELEMETRY": "false",
        }
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / "open-webui"), "serve", f"--port={port}"],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=output,
            )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text(errors="replace")[-2000:]) from None
            time.sleep(1)


@dataclass
class Visit:
    """A browser in which somebody has signed up, and what came of it at our end."""

    page: Page
    address: str
    noted: Noted

    def say(self, text: str) -> str:
        """Send a message and wait for the whole answer; its text."""
        answers = self.page.locator(".chat-assistant")
        before = answers.count()
        self.page.locator("#chat-input").click()
        self.page.keyboard.type(text)
        self.page.locator("#send-message-button").click()
        answers.nth(before).wait_for(timeout=ANSWER_S * 1000)
        # The buttons below an answer come with its end.
        self.page.locator(".copy-response-button").nth(before).wait_for(timeout=ANSWER_S * 1000)
        return answers.nth(before).inner_text()

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [each for each in self.noted.take() if each["path"].endswith(path)]


@cache
def visit(at: Endpoint) -> Visit:
    """Sign up as the first user. All of it ends with this process."""
    noted = Noted()
    proxy = proxy_to(at.url, noted)
    upstream = f"http://127.0.0.1:{proxy.server_address[1]}"
    ends = ExitStack()
    atexit.register(ends.close)
    address = ends.enter_context(open_webui(upstream, at.key))
    browser = ends.enter_context(sync_playwright()).chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    for name in ("Get started", "Create Admin Account"):
        button = page.get_by_role("button", name=name)
        if name == "Create Admin Account":
            page.locator("#name").fill("Somebody")
            page.locator("#email").fill("somebody@example.org")
            page.locator("#password").fill("a password of a test")
        button.click()
    page.locator("#chat-input").wait_for(timeout=60_000)
    close = page.get_by_role("button", name="Okay, Let's Go!")
    with suppress(TimeoutError):
        close.click(timeout=10_000)
    return Visit(page, address, noted)


@case
def model_list(at: Endpoint) -> object:
    here = visit(at)
    assert here.asked("/models")
    return here.page.locator("#model-selector-model-button").inner_text()


@case
def first_hello(at: Endpoint) -> object:
    here = visit(at)
    said = here.say("hello")
    here.page.wait_for_timeout(1000)  # what ended is noted after its last piece
    asked = [each for each in here.asked("/chat/completions") if each.get("stream")]
    assert said and asked and asked[0]["tools"], (asked, said)
    return asked[0]


@case
def title_tags_and_follow_ups(at: Endpoint) -> object:
    here = visit(at)
    here.say("What is a river?")
    here.page.wait_for_timeout(15_000)
    asked = [each for each in here.asked("/chat/completions") if not each.get("stream")]
    assert asked, "no task was asked for"
    return asked


@case
def picture(at: Endpoint) -> object:
    here = visit(at)
    data = base64.b64decode(at.picture.partition(",")[2])
    one: FilePayload = {"name": "one.png", "mimeType": "image/png", "buffer": data}
    here.page.locator("input[type=file]").first.set_input_files(one)
    here.page.wait_for_timeout(3000)
    here.say("What is this?")
    shown = [each["images"] for each in here.asked("/chat/completions") if each.get("stream")]
    assert shown[0] == 1, shown
    return shown


@case
def picture_in_a_second_turn(at: Endpoint) -> object:
    here = visit(at)
    here.say("And now?")
    shown = [each["images"] for each in here.asked("/chat/completions") if each.get("stream")]
    assert shown[0] == 1, shown
    return shown


if __name__ == "__main__":
    main(case, {"open-webui": version("open-webui")})
