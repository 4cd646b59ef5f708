"""The launch script as `make run` starts it: its curl, the quickstart, and a chat program's tools.

Then out with Ctrl-C. tests/unit/deploy has the other scripts, which start this one.
"""

import contextlib
import json
import re
import secrets
import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from common.launcher.demo import FRONTEND_FLAGS, WORKER_FLAGS
from tests.certificates import Authority
from tests.e2e.processes import (
    ONE_PROCESS,
    START_TIMEOUT_S,
    Process,
    environment,
    shared_memory_of,
    start_frontend,
)
from tests.fakes.launched import living
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "launch"
READY = "Ctrl-C stops everything"


def start(
    model: Path, directory: Path, script: str = "agg_multimodal_router.sh", **variables: str
) -> Process:
    defaults = {
        "MODEL": str(model),
        "WORKERS": "1",
        "PORT": str(free_port()),
        "ENGINE_ARGS": "--served-model-name demo",
        "RUN_DIR": str(directory / script),
        "MMROUTER_PYTHON": sys.executable,
    }
    log = directory / f"{script}.log"
    return Process(script, [str(SCRIPTS / script)], log, **defaults | variables)


def wait_until_ready(script: Process) -> str:
    """What it has printed by then."""
    deadline = time.monotonic() + 420
    while READY not in script.tail(500):
        script.check_alive()
        assert time.monotonic() < deadline, script.tail()
        time.sleep(0.5)
    return script.tail(500)


def many_tools() -> list[dict[str, Any]]:
    """As Open WebUI sends them with each message: 36 functions in 25 KB of JSON."""
    optional = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    properties = {
        "query": {"type": "string", "description": "What to look for"},
        "ids": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer", "default": 5},
        "skip": optional,
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    about = "Look through what this user has kept, and return what was found there. "
    functions = [
        {"name": f"search_{number}", "description": about * 5, "parameters": parameters}
        for number in range(36)
    ]
    return [{"type": "function", "function": each} for each in functions]


def greet(url: str, verify: ssl.SSLContext | bool = True, tools: bool = True) -> httpx.Response:
    """The first message of a user of Open WebUI."""
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = many_tools()
        assert 24_000 < len(json.dumps(body["tools"])) < 27_000
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300, verify=verify)


def try_the_curl(printed: str) -> None:
    (curl,) = re.findall(r"^\s*(curl .*?)(?:\n\s*\n|\Z)", printed, re.M | re.S)
    answer = subprocess.run(
        ["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert '"content"' in answer.stdout, answer.stdout


def test_it_serves_until_ctrl_c_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    cards = tmp_path / "cards"
    cards.mkdir(mode=0o700)
    demo = {
        "ENGINE_ARGS": shlex.join([*WORKER_FLAGS, ONE_PROCESS]),
        "FRONTEND_ARGS": shlex.join(FRONTEND_FLAGS),
    }
    shared = {"DISCOVERY": str(cards), "WORKER_NAME": "worker"}
    script = start(model, tmp_path, MARK=mark, **demo, **shared)
    try:
        with over_tls(tmp_path, cards) as try_tls:
            use(script)
            try_tls()
        pids = set(living(mark))
        assert len(pids) >= 3, "the script, a worker, a frontend"
        script.signal(signal.SIGINT)
        script.wait()
        assert living(mark) == []
        assert not shared_memory_of(*pids)
    finally:
        script.stop()


def use(script: Process) -> None:
    """Paste all that the script and the docs have for this."""
    printed = wait_until_ready(script)
    try_the_curl(printed)
    assert "worker-0" in paste(example_client(printed))
    status = f"{sys.executable} -m common.cli.mmrouter status --url {url_of(printed)}"
    assert re.search(r"worker-0 +demo +healthy", paste(status, ROOT))

    greeted = greet(url_of(printed))
    assert greeted.status_code == 200, greeted.text
    usage = re.findall(r'"usage":(\{.*?\}),', greeted.text)[-1]
    assert '"completion_tokens":256' in usage, "the demo's answers have an end"
    assert greeted.text.endswith("data: [DONE]\n\n")

    said = [run_as_pasted(lines, url_of(printed)) for lines in (*quickstart(), readme())]
    assert len(said) == 4
    assert '"candidates"' in said[3]
    assert "worker-0" in said[1], "the table of send_pictures.py"


@contextlib.contextmanager
def over_tls(tmp_path: Path, cards: Path) -> Iterator[Callable[[], None]]:
    """Another frontend for the same worker, which asks for a client certificate, and has no flags
    for tools. It starts meanwhile."""
    authority = Authority(tmp_path / "ca")
    server, client = authority.certify("127.0.0.1"), authority.certify("client")
    frontend = start_frontend(
        "tls", cards, tmp_path, f"--ssl-certfile={server.certificate}",
        f"--ssl-keyfile={server.key}", f"--ssl-ca-certs={authority.certificate}",
        "--ssl-cert-reqs=2", tools=False,
    )  # fmt: skip

    def try_it() -> None:
        url = frontend.url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=authority.certificate)
        context.load_cert_chain(client.certificate, client.key)
        with httpx.Client(verify=context) as asked:
            deadline = time.monotonic() + START_TIMEOUT_S
            while ask_for_health(asked, url) != 200:
                frontend.check_alive()
                assert time.monotonic() < deadline, frontend.tail()
                time.sleep(0.5)
        assert greet(url, context, tools=False).text.endswith("data: [DONE]\n\n")
        refused = greet(url, context)
        assert refused.status_code == 400
        assert "at the frontend (mmrouter frontend" in refused.text

    try:
        yield try_it
    finally:
        frontend.stop()


def ask_for_health(client: httpx.Client, url: str) -> int:
    try:
        return client.get(f"{url}/health", timeout=5).status_code
    except httpx.TransportError:
        return 0


def example_client(printed: str) -> str:
    """The second command that the script prints."""
    (command,) = re.findall(r"^\S*python\S* \S*send_pictures.py --stream --url .*$", printed, re.M)
    return str(command)


def quickstart() -> list[str]:
    """What the page has one paste into a shell while everything runs."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    running = page.partition("## Ask")[2].partition("## By hand")[0]
    return re.findall(r"^```sh\n(.*?)^```", running, re.M | re.S)


def readme() -> str:
    """What it has one paste into a second terminal."""
    page = (ROOT / "README.md").read_text().partition("In a second terminal")[2]
    return re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)[0]


def run_as_pasted(lines: str, url: str) -> str:
    """The output of such lines, but for port and interpreter as they stand there."""
    lines = lines.replace("http://127.0.0.1:8000", url).replace(".venv/bin/python", sys.executable)
    lines = lines.replace("send_pictures.py", f"send_pictures.py --url {url}")
    return paste(lines, ROOT)


def paste(lines: str, directory: Path | None = None) -> str:
    """What a shell prints for them, in the working directory of the script unless told."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines],
        cwd=directory, capture_output=True, text=True, timeout=120, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stdout


def url_of(printed: str) -> str:
    (url,) = re.findall(r"Ready after \d+ s at (\S+)\. Try", printed)
    return str(url)
