"""Every wait for a process ends: what does not answer is killed and replaced."""

import contextlib
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from prometheus_client import REGISTRY

from common.errors import ConfigurationError, OutOfFilesError, OverloadedError
from common.vllm_compat.renderer_patches import HfProcessorRuns
from frontend.bounded import child_process, fork_supply
from frontend.bounded.child_process import ChildProcess, Deadline
from frontend.fetch.allowance import RequestAllowance
from frontend.media_limits.budget import Budget
from frontend.media_limits.policy import FetchPolicy, RefusedError, RequestLimitError
from frontend.processing import backends
from frontend.processing.backends import ProcessPool
from frontend.processing.batch import Batch
from frontend.processing.child_messages import StartUp
from frontend.processing.errors import ProcessingFailedError
from frontend.processing.store import PrivateStore
from tests.e2e.processes import Process
from tests.fakes.cards import make_card
from tests.unit.frontend.processing.stand_in import Told

MEGAPIXEL = 1_000_000

STAND_IN = "tests.unit.frontend.processing.stand_in"


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def restarts() -> float:
    return REGISTRY.get_sample_value("mmrouter_child_restarts_total", {"role": "media"}) or 0.0


class Pool:
    """One process, which does as it is told."""

    def __init__(self, decode_timeout_s: float = 5.0) -> None:
        self.decoding = Budget(2 * MEGAPIXEL, MEGAPIXEL, "megapixels")
        policy = FetchPolicy(decode_timeout_s=decode_timeout_s)
        order = StartUp(make_card(), Namespace(), policy, None)
        runs = cast(HfProcessorRuns, None)  # nothing is processed here
        self.pool = ProcessPool(order, 1, PrivateStore(1.0), runs, self.decoding)
        self._restarts_before = restarts()

    @property
    def pid(self) -> int:
        (pid,) = self.pool.pids
        return pid

    @property
    def restarts(self) -> float:
        return restarts() - self._restarts_before

    def submit(self, told: Told, **limits: object) -> Callable[[float], object]:
        allowance = RequestAllowance(FetchPolicy.model_validate(limits))
        return self.pool.submit(cast(Batch, told), lambda: False, allowance).result

    def run(self, told: Told, **limits: object) -> None:
        self.submit(told, **limits)(100)

    def does(self, told: Told, **limits: object) -> bool:
        with pytest.raises(ValueError, match="done as told"):
            self.run(told, **limits)
        return True


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MODULE", STAND_IN)


@pytest.fixture
def one() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.pool.close()


def test_a_process_that_was_stopped_is_replaced_and_its_work_done(one: Pool) -> None:
    before = one.pid
    os.kill(before, signal.SIGSTOP)
    assert one.does(Told())
    assert one.pid != before
    assert not psutil.pid_exists(before)


def test_a_process_that_does_not_read_is_replaced_too(one: Pool) -> None:
    """The batch is larger than what the kernel takes for it."""
    before = one.pid
    os.kill(before, signal.SIGSTOP)
    assert one.does(Told(bulk=bytes(8 << 20)))
    assert one.pid != before


def test_a_batch_that_hangs_every_process_is_given_up(one: Pool) -> None:
    with pytest.raises(ProcessingFailedError, match="hung in processing this image"):
        one.run(Told(hangs=True))
    assert one.restarts == 2
    assert one.does(Told())


HUNG = """
import sys, threading
from pathlib import Path
from tests.unit.frontend.processing import test_hung_processes as hung
from tests.unit.frontend.processing.stand_in import Told
hung.backends.MODULE = hung.STAND_IN
one = hung.Pool(decode_timeout_s=1000)
one.submit(Told(hangs=True))
Path(sys.argv[1]).write_text(str(one.pid))
threading.Event().wait()
"""


def test_a_process_that_hangs_ends_with_its_frontend(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    frontend = Process("frontend", [sys.executable, "-c", HUNG, str(file)], tmp_path / "log")
    while not (file.exists() and file.read_text()):
        frontend.check_alive()
        time.sleep(0.05)
    hung = psutil.Process(int(file.read_text()))
    frontend.signal(signal.SIGKILL)
    frontend.wait()
    hung.wait(60)


def test_several_media_hang_one_process_only(one: Pool) -> None:
    """They are tried one by one afterwards, which is the second try of each."""
    with pytest.raises(ProcessingFailedError, match="hung"):
        one.run(Told(hangs=True, media=(None, None)))
    assert one.restarts == 1


def test_pixels_are_asked_for_before_a_process_decodes(one: Pool) -> None:
    large = Told(pixels=(10, MEGAPIXEL))
    with pytest.raises(RequestLimitError, match="1 megapixels together"):
        one.run(large, max_request_megapixels=1.0)
    with pytest.raises(RefusedError, match="2 megapixels"):
        one.run(Told(pixels=(MEGAPIXEL, 10, MEGAPIXEL)))
    with one.decoding.reserve(MEGAPIXEL), pytest.raises(OverloadedError, match="try again later"):
        one.run(large)
    assert one.does(large)
    assert one.decoding.reserved == 0
    assert one.restarts == 0, "what is refused costs no process"


def test_what_died_is_not_counted_twice(one: Pool) -> None:
    os.kill(one.pid, signal.SIGKILL)
    assert one.does(Told(pixels=(MEGAPIXEL,)), max_request_megapixels=1.5)
    os.kill(one.pid, signal.SIGSTOP)
    assert one.does(Told(pixels=(MEGAPIXEL,)), max_request_megapixels=1.5)


def test_closing_when_nobody_waits_any_more() -> None:
    """As when a frontend's tasks are cancelled before it closes."""
    pool = Pool(decode_timeout_s=3600.0)
    os.kill(pool.pid, signal.SIGSTOP)
    waiting = [
        pool.pool.submit(cast(Batch, Told()), lambda: False, RequestAllowance(FetchPolicy()))
        for _ in range(3)
    ]
    for each in waiting:
        each.cancel()
    pool.pool.close()
    assert all(each.done() for each in waiting)


def test_closing_ends_also_with_a_process_that_was_stopped() -> None:
    pool = Pool(decode_timeout_s=3600.0)
    pid = pool.pid
    os.kill(pid, signal.SIGSTOP)
    waiting = [pool.submit(Told()) for _ in range(2)]
    pool.pool.close()
    for each in waiting:
        with pytest.raises(ProcessingFailedError, match="shutting down"):
            each(0)
    assert not psutil.pid_exists(pid)


def test_a_process_that_never_gets_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "START_S", 0.2)
    monkeypatch.setattr(backends, "MODULE", "tests.unit.frontend.processing.silent_stand_in")
    before = descendants()
    with pytest.raises(ConfigurationError, match=r"did not start within 0.2 s"):
        Pool()
    assert descendants() == before


def test_a_process_that_is_killed_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was refused for 300 s."""
    wait = ChildProcess.wait_until_ready
    killed: list[int] = []

    def kill_the_first(process: ChildProcess) -> None:
        if not killed:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        wait(process)

    monkeypatch.setattr(ChildProcess, "wait_until_ready", kill_the_first)
    monkeypatch.setattr(backends, "MODULE", STAND_IN)
    one = Pool()
    assert one.does(Told())
    assert killed != [one.pid]
    one.pool.close()


def test_a_fork_server_that_never_gets_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_supply, "START_S", 0.2)
    monkeypatch.setattr(fork_supply, "COMMAND", ["sh", "-c", "sleep 1000"])
    before = descendants()
    with pytest.raises(ConfigurationError, match=r"did not start within 0.2 s"):
        Pool()
    assert descendants() == before


def test_a_fork_server_that_can_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MODULE", "tests.there.is.no.such.module")
    with pytest.raises(ConfigurationError, match="did not start"):
        Pool()


def end_server_of(pid: int) -> None:
    """Kill who started a process. Until it is gone it may still take a connection, and reset it."""
    server = psutil.Process(pid).parent()
    assert server is not None
    server.kill()
    with contextlib.suppress(psutil.NoSuchProcess):  # it is reaped meanwhile
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_a_fork_server_that_dies_takes_nobody_along_and_is_started_again(one: Pool) -> None:
    before = one.pid
    end_server_of(before)
    assert one.does(Told())
    assert (one.pid, one.restarts) == (before, 0)
    os.kill(before, signal.SIGKILL)
    assert one.does(Told())
    assert one.pid != before


def test_closing_while_a_fork_server_does_not_answer(one: Pool) -> None:
    server = psutil.Process(one.pid).parent()
    assert server is not None
    server.suspend()
    os.kill(one.pid, signal.SIGKILL)
    waiting = one.submit(Told())
    while one.restarts == 0:
        time.sleep(0.01)
    one.pool.close()
    with pytest.raises(ProcessingFailedError):
        waiting(0)
    assert not server.is_running()


def test_a_process_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_supply, "COMMAND", ["/there/is/no/such/program"])
    with pytest.raises(ConfigurationError, match="can't be started"):
        Pool()


def test_a_process_that_can_not_be_replaced_now_is_later(
    one: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(fork_supply, "COMMAND", ["/there/is/no/such/program"])
        end_server_of(one.pid)
        os.kill(one.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ProcessingFailedError, match="can't be started"):
                one.run(Told())
    assert one.does(Told())


def test_a_process_that_there_is_no_handle_for_is_no_mediums_fault(
    one: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel leaves out what it has no room for, and says that all is well."""
    receive = socket.recv_fds

    def without_handles(*args: Any) -> object:
        said, handles, *rest = receive(*args)
        for each in handles:
            os.close(each)
        return said, [], *rest

    with monkeypatch.context() as full:
        full.setattr(socket, "recv_fds", without_handles)
        os.kill(one.pid, signal.SIGKILL)
        with pytest.raises(ProcessingFailedError, match="can't be watched") as caught:
            one.run(Told())
    assert OutOfFilesError.caused(caught.value)
    assert one.does(Told())


def test_a_deadline_that_is_kept_does_nothing() -> None:
    given_up: list[bool] = []
    with Deadline(1000, lambda: given_up.append(True)) as deadline:
        deadline.extend(1)
    assert not given_up and not deadline.missed


def test_a_deadline_that_is_missed() -> None:
    given_up: list[bool] = []
    deadline = Deadline(0.0, lambda: given_up.append(True))
    with deadline:
        while not given_up:
            time.sleep(0.001)
    assert deadline.missed
