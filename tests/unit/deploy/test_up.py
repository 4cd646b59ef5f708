"""``mmrouter up`` with played frontends and workers: who gets which flag, and that nothing is left.

``test_launch_scripts.py`` has what the launch scripts share with it.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backend_worker.args import parse as parse_worker
from common.errors import ConfigurationError, MmRouterError
from common.launcher import devices as devices_module
from common.launcher import sweeper as sweeper_module
from common.launcher.devices import Devices
from common.launcher.options import make_plan
from common.launcher.sweeper import Sessions, Sweeper
from frontend.args import parse as parse_frontend
from tests.e2e.processes import Process
from tests.fakes.launched import calls, interpreter, living, model_at

READY = "Ctrl-C stops everything"


class Up:
    """One that runs."""

    def __init__(self, directory: Path, *flags: str, model: str = "model") -> None:
        self.directory = directory
        self.mark = secrets.token_hex(8)
        self.scratch = directory / "tmp"
        self.scratch.mkdir()
        path = model_at(directory / model)
        self.process = Process(
            "up",
            [sys.executable, "-m", "common.launcher", str(path), "--port=0", *flags],
            directory / "up.log",
            MARK=self.mark,
            MMROUTER_PYTHON=str(interpreter(directory)),
            TMPDIR=str(self.scratch),
            CUDA_VISIBLE_DEVICES="",
        )

    @property
    def said(self) -> str:
        return self.process.log.read_text()

    def until(self, line: str) -> None:
        deadline = time.monotonic() + 120
        while line not in self.said:
            assert time.monotonic() < deadline, self.said
            self.process.check_alive()
            time.sleep(0.05)

    def children(self, argument: str) -> list[psutil.Process]:
        """Those that have `argument` on their command line; children may end meanwhile."""
        found = []
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # zombies too
                if argument in each.cmdline():
                    found.append(each)
        return found

    def sweepers(self) -> list[int]:
        """Processes that are forks of it."""
        return [each.pid for each in self.children("common.launcher")]

    def until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 60
        while living(self.mark) or any(self.scratch.iterdir()):
            assert time.monotonic() < deadline, (living(self.mark), list(self.scratch.iterdir()))
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.stop()
        for pid in living(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def up(directory: Path, *flags: str, model: str = "model") -> Iterator[Up]:
    one = Up(directory, "--run-dir", str(directory / "logs"), *flags, model=model)
    try:
        yield one
    finally:
        one.stop()


def test_each_flag_goes_to_who_has_it(tmp_path: Path) -> None:
    flags = ["--max-model-len", "1024", "--max-inflight=7", "--trust_remote_code", "--workers=2"]
    more = ["--frontend-args", "--log-level debug", "--engine-args", "--log-level error"]
    with up(tmp_path, *flags, *more) as one:
        one.until(READY)
        frontend, *others = (parse_frontend(each.argv) for each in calls(tmp_path, "frontend"))
        assert others == [], "it starts one"
        workers = [parse_worker(each.argv) for each in calls(tmp_path, "backend_worker")]
        assert sorted(str(each.worker_id) for each in workers) == ["worker-0", "worker-1"]
        assert {each.engine.max_model_len for each in workers} == {1024}
        assert frontend.http.max_inflight == 7
        assert {each.engine.trust_remote_code for each in workers} == {True}
        assert frontend.serve.trust_remote_code
        assert frontend.process.log_level == "debug"
        assert {each.process.log_level for each in workers} == {"error"}
        for name in ("worker-0", "worker-1", "frontend"):
            assert f"] {name} is ready" in one.said
        one.process.signal(signal.SIGINT)
        assert one.process.wait() == 130
        one.until_nothing_is_left()


@pytest.mark.parametrize("victim", ["it", "its sweeper", "both"])
def test_nothing_is_left_whoever_is_killed(victim: str, tmp_path: Path) -> None:
    with up(tmp_path) as one:
        one.until(READY)
        (sweeper,) = one.sweepers()
        assert len(living(one.mark)) == 5, "it, its sweeper, two workers and a frontend"
        if victim != "it":
            os.kill(sweeper, signal.SIGKILL)
        if victim == "its sweeper":
            one.process.signal(signal.SIGTERM)
            assert one.process.wait() == 143
        else:
            one.process.signal(signal.SIGKILL)
            one.process.wait()
        if victim == "both":  # the kernel ends the others, and temporary files stay
            deadline = time.monotonic() + 60
            while living(one.mark):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        else:
            one.until_nothing_is_left()


def test_a_sweeper_that_was_killed_has_a_successor(tmp_path: Path) -> None:
    with up(tmp_path) as one:
        one.until(READY)
        (first,) = one.sweepers()
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not (now := one.sweepers()) or first in now:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        one.process.signal(signal.SIGKILL)
        one.process.wait()
        one.until_nothing_is_left()


def test_a_successor_knows_the_shared_memory_of_processes_that_ended_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper_module, "POLL_INTERVAL_S", 0.0)
    left = Path("/dev/shm") / f"mmrouter-test-{secrets.token_hex(8)}"
    left.touch()
    sessions = Sessions(1.0, tmp_path / "scratch")
    sweeper = Sweeper(sessions)
    with left.open() as file:
        held = subprocess.Popen(["sleep", "600"], stdin=file, start_new_session=True)
    sweeper.started(held.pid)
    sweeper.look()
    os.kill(sweeper._pid, signal.SIGKILL)
    held.kill()
    held.wait()
    first = sweeper._pid
    while sweeper._pid == first:
        sweeper.look()
    assert left.exists()
    sweeper.stop()
    while not sweeper.ended():
        time.sleep(0.01)
    assert not left.exists()


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    with up(tmp_path, "--workers=1", model="stubborn") as one:
        one.until(READY)
        one.process.signal(signal.SIGINT)
        one.until("Ctrl-C again kills")
        assert len(calls(tmp_path, "backend_worker")) == 1 and living(one.mark)
        one.process.signal(signal.SIGINT)
        assert one.process.wait(30) == 130
        one.until_nothing_is_left()


def test_a_worker_that_ends_at_its_start(tmp_path: Path) -> None:
    with up(tmp_path, model="broken") as one:
        assert one.process.wait(60) == 1
        assert "error: worker-0 ended with 1: ValueError: max_model_len is too large" in one.said
        one.until_nothing_is_left()


def test_a_worker_that_is_killed_later(tmp_path: Path) -> None:
    with up(tmp_path) as one:
        one.until(READY)
        killed = one.children("backend_worker")
        killed[0].kill()
        one.until("was ended by SIGKILL; the others go on")
        killed[1].kill()
        assert one.process.wait(60) == 1
        assert "was ended by SIGKILL; no other is left" in one.said


def test_what_can_t_be_is_a_sentence_before_anything_is_started(tmp_path: Path) -> None:
    with up(tmp_path, "--max-model-le=5") as one:
        assert one.process.wait(60) == 2
        assert one.said.startswith("error: ") and one.said.count("\n") == 1
        assert "--max-model-le is unknown; did you mean --max-model-len?" in one.said
        assert not calls(tmp_path, "frontend") + calls(tmp_path, "backend_worker")
        one.until_nothing_is_left()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--workers=0"], "--workers=0 starts frontends only: set --discovery"),
        (["--workers", "some"], "--workers must be a number, not 'some'"),
        (["--workers"], "expected one argument"),
        (["--frontends=0"], "--frontends=0 starts workers only: set --discovery"),
        (["--frontends=0", "--workers=0"], "--workers and --frontends are both 0"),
        (["--gpus-per-worker=0"], "--gpus-per-worker must be 1 or more"),
        (["--start-timeout=2m"], "--start-timeout must be a number"),
        (["--single-gpu", "more"], "more"),
        (["--worker-name=a b"], "--worker-name must have letters, digits"),
        (["--router-mode=kvv"], "--router-mode='kvv' is unusable: it is one of kv, round-robin"),
        (["--port=http"], "--port must be a number"),
        (["--port=65536"], "ports end at 65535"),
        (["--host=no.such.host.invalid"], "--host=no.such.host.invalid is no address"),
        (["--discovery=/no/such"], "there is no directory /no/such for the workers"),
        (["--fleet-key-file=/no/such"], "the fleet key /no/such can't be read"),
        (["--config=/no/such"], "--config is a flag of both: write --frontend-args"),
        (["--engine-args=--a 'b"], "--engine-args can't be taken apart"),
        (["--frontend-args=--port=1"], "--frontend-args has --port, which is"),
        (["--frontend-args=--config /no/such"], "/no/such can't be read"),
        (["--frontend-args=--ssl-certfile /no"], "--ssl-certfile: /no can't be read"),
        (["--api-key-file=/no"], "the API keys in /no can't be read"),
        (["--uds=/x", "--frontends=2"], "--uds is one socket"),
        (["--model=/no/such"], "there is no directory /no/such"),
        (["--run-dir=/dev/null/x"], "--run-dir=/dev/null/x can't be written to"),
    ],
)
def test_what_can_t_be(flags: list[str], sentence: str, tmp_path: Path) -> None:
    model = [] if "--model" in flags[0] else [str(model_at(tmp_path / "model"))]
    with pytest.raises(MmRouterError, match=re.escape(sentence)):
        make_plan([*model, f"--run-dir={tmp_path}", "--port=0", *flags], {})


def test_a_port_in_use(tmp_path: Path) -> None:
    model = str(model_at(tmp_path / "model"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MmRouterError, match=f"port {port} on 127.0.0.1 is in use"):
            make_plan([model, f"--port={port}", f"--run-dir={tmp_path}"], {})


@pytest.mark.parametrize(
    ("visible", "given"),
    [
        ("GPU-0b, GPU-0a", ["GPU-0b", "GPU-0a"]),
        ("MIG-1b,MIG-1a", ["MIG-1b", "MIG-1a"]),
        ("3,1", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("-1,0", []),
    ],
)
def test_gpus_by_number_or_uuid(
    visible: str, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "_is_cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices = Devices.find(single=False, per_worker=1)
    found = [devices.environment(n).get("CUDA_VISIBLE_DEVICES") for n in range(len(given))]
    assert found == given
    assert str(devices) == (f"{len(given)} GPUs" if given else "a CPU")


def test_an_engine_has_one_instance_of_mig() -> None:
    devices = Devices(["MIG-1a", "MIG-1b"], single=False, per_worker=2)
    with pytest.raises(ConfigurationError, match="can use one MIG instance only"):
        devices.check(1)
