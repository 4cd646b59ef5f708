"""The launch script as a user runs it: to the curl that it prints, and out with Ctrl-C."""

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
SCRIPT = ROOT / "examples" / "launch" / "agg_multimodal_router.sh"


def start(model: Path, directory: Path, *flags: str, **variables: str) -> Process:
    return Process(
        "launch-script",
        [str(SCRIPT), *flags],
        directory / "launch.log",
        MODEL=str(model),
        WORKERS="1",
        PORT=str(free_port()),
        ENGINE_ARGS="--served-model-name demo",
        RUN_DIR=str(directory / "run"),
        MMROUTER_PYTHON=sys.executable,
        **variables,
    )


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
        deadline = time.monotonic() + 240
        while "Ctrl-C stops everything" not in script.tail(200):
            script.check_alive()
            assert time.monotonic() < deadline, script.tail()
            time.sleep(0.5)
        printed = script.tail(500)
        (curl,) = re.findall(r"^\s*(curl .*?)(?:\n\s*\n|\Z)", printed, re.M | re.S)
        answer = subprocess.run(
            ["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=False
        )
        assert answer.returncode == 0, answer.stderr
        assert '"content"' in answer.stdout, answer.stdout

        client = subprocess.run(
            [sys.executable, ROOT / "examples" / "send_pictures.py", "--url", url_of(printed)],
            capture_output=True, text=True, timeout=120, check=False, env=environment(),
        )  # fmt: skip
        assert client.returncode == 0, client.stderr
        assert "worker-0" in client.stdout

        pids = set(living(mark))
        assert len(pids) >= 3, "the script, a worker, a frontend"
        script.signal(signal.SIGINT)
        script.wait()
        assert living(mark) == []
        assert not shared_memory_of(*pids)
    finally:
        script.stop()


def test_a_worker_that_dies_at_start_ends_it_with_its_error(model: Path, tmp_path: Path) -> None:
    script = start(model, tmp_path, "--max-model-len", "99999999")
    try:
        assert script.wait(240) != 0
        assert "max_model_len" in script.tail(200)
    finally:
        script.stop()


def url_of(printed: str) -> str:
    (url,) = re.findall(r"Ready after \d+ s at (\S+)\. Try", printed)
    return str(url)
