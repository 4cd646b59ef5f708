"""The launch script as a user runs it: to the curl that it prints and what the quickstart has, and
out with Ctrl-C. tests/unit/deploy has the other scripts, which start this one."""

import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.processes import Process, environment, shared_memory_of
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


def try_the_curl(printed: str) -> None:
    (curl,) = re.findall(r"^\s*(curl .*?)(?:\n\s*\n|\Z)", printed, re.M | re.S)
    answer = subprocess.run(
        ["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert '"content"' in answer.stdout, answer.stdout


def living(mark: str) -> list[int]:
    """Processes that inherited a variable with this value, zombies left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
            if marked and ") Z " not in (process / "stat").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_it_serves_until_ctrl_c_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    script = start(model, tmp_path, MARK=mark)
    try:
        printed = wait_until_ready(script)
        try_the_curl(printed)

        said = [run_as_pasted(lines, url_of(printed)) for lines in quickstart()]
        assert len(said) == 3
        assert "worker-0" in said[1], "the table of send_pictures.py"

        pids = set(living(mark))
        assert len(pids) >= 3, "the script, a worker, a frontend"
        script.signal(signal.SIGINT)
        script.wait()
        assert living(mark) == []
        assert not shared_memory_of(*pids)
    finally:
        script.stop()


def quickstart() -> list[str]:
    """What the page has one paste into a shell while everything runs."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    running = page.partition("## Ask")[2].partition("## By hand")[0]
    return re.findall(r"^```sh\n(.*?)^```", running, re.M | re.S)


def run_as_pasted(lines: str, url: str) -> str:
    """The output of such lines, but for port and interpreter as they stand there."""
    lines = lines.replace("http://127.0.0.1:8000", url).replace(".venv/bin/python", sys.executable)
    lines = lines.replace("send_pictures.py", f"send_pictures.py --url {url}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stdout


def url_of(printed: str) -> str:
    (url,) = re.findall(r"Ready after \d+ s at (\S+)\. Try", printed)
    return str(url)
