"""The parent of a worker, with a shell script in the worker's place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend_worker.engine.ipc_names import SHARED_MEMORY, instance_name

PARENT = """
import os, sys
from backend_worker.supervise import supervise
supervise()
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(tmp_path: Path, script: str) -> subprocess.Popen[bytes]:
    """The parent, over a script in the worker's place."""
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\n{script}\n")
    worker.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(worker)],
        start_new_session=True,
        # Tests that run in the background ignore it, and a shell could not trap it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text().strip()


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_is_the_workers(tmp_path: Path, status: int) -> None:
    assert start(tmp_path, f"exit {status}").wait(10) == status


def test_a_killed_worker_takes_its_descendants_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A grandchild in a session of its own, as an engine process may be.
    parent = start(
        tmp_path,
        f"setsid sh -c 'echo $$ > {tmp_path}/engine; exec sleep 100' &\n"
        f"echo $$ > {tmp_path}/pid; wait",
    )
    engine, worker = int(wait_for(tmp_path / "engine")), int(wait_for(tmp_path / "pid"))
    os.kill(worker, signal.SIGKILL)
    assert parent.wait(10) == 128 + signal.SIGKILL
    assert not is_alive(engine)
    assert "killed by SIGKILL" in capfd.readouterr().err


def test_of_a_killed_worker_no_memory_is_left(tmp_path: Path) -> None:
    parent = start(tmp_path, f"echo $$ > {tmp_path}/pid; while true; do sleep 0.05; done")
    worker = int(wait_for(tmp_path / "pid"))
    file = SHARED_MEMORY / f"vllm_ec_{instance_name(worker)}_dp0.mmap"
    file.touch()
    try:
        os.kill(worker, signal.SIGKILL)
        assert parent.wait(10) == 128 + signal.SIGKILL
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_worker(tmp_path: Path, number: signal.Signals) -> None:
    parent = start(
        tmp_path,
        f"trap 'exit 7' TERM INT HUP; echo $$ > {tmp_path}/pid; while true; do sleep 0.05; done",
    )
    wait_for(tmp_path / "pid")
    parent.send_signal(number)
    assert parent.wait(10) == 7


def test_if_the_parent_is_killed_the_worker_is_asked_to_stop(tmp_path: Path) -> None:
    parent = start(
        tmp_path,
        f"trap 'echo stopped > {tmp_path}/end; exit' TERM; echo $$ > {tmp_path}/pid\n"
        "while true; do sleep 0.05; done",
    )
    wait_for(tmp_path / "pid")
    parent.kill()
    parent.wait(10)
    assert wait_for(tmp_path / "end") == "stopped"


@pytest.mark.parametrize("muted", [True, False])
def test_what_a_library_says_when_python_has_ended_is_dropped(muted: bool) -> None:
    script = (
        "import atexit, ctypes, sys; from backend_worker.__main__ import _mute\n"
        "libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.malloc_stats, None, None)\n"
        f"print('said', file=sys.stderr); {muted} and atexit.register(_mute)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith("said\n")
    assert ("Arena 0" in done.stderr) == (not muted)
