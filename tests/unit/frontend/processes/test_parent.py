"""Several processes behind one port: they start, end and answer together, and one that is killed
takes nothing along."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.aio.ipc import LARGEST
from common.errors import ListenError
from frontend.processes import child as child_module
from frontend.processes import parent as parent_module
from frontend.processes.child import MEMBER, Child
from frontend.processes.listeners import listen
from frontend.processes.parent import Parent
from tests.waiting import until

ROOT = Path(__file__).parents[4]


class Group:
    """A parent in a process of its own, and its children."""

    def __init__(self, process: asyncio.subprocess.Process, uds: str) -> None:
        self.process = process
        self.uds = uds

    async def ask(self, question: str) -> str:
        """Whoever accepts the connection answers."""
        reader, writer = await asyncio.open_unix_connection(self.uds)
        try:
            writer.write(f"{question}\n".encode())
            return (await reader.readline()).decode().strip()
        finally:
            writer.close()

    async def ask_process(self, name: str, question: str) -> str:
        """A certain process: connections are tried until it has accepted one."""
        while True:
            reader, writer = await asyncio.open_unix_connection(self.uds)
            try:
                writer.write(b"name\n")
                said = (await reader.readline()).split()
                if said and said[0].decode() == name:
                    writer.write(f"{question}\n".encode())
                    return (await reader.readline()).decode().strip()
            finally:
                writer.close()
            await asyncio.sleep(0.01)

    async def pid(self, name: str) -> int:
        return int((await self.ask_process(name, "name")).split()[1])

    async def serves(self) -> None:
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(OSError):
                    await self.ask("name")
                    return
                assert self.process.returncode is None
                await asyncio.sleep(0.02)

    def arenas(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"mmrouter-arena-{self.process.pid}-*"))


@asynccontextmanager
async def parent_here(
    directory: Path, drain_timeout_s: float, *, on_port: bool = False
) -> AsyncIterator[Parent]:
    """A parent of two in this process."""
    module = "tests.unit.frontend.processes.member"
    where = [] if on_port else [str(directory / "uds")]
    command = [sys.executable, "-m", module, str(directory), *where]
    try:
        async with asyncio.timeout(120):
            yield Parent(command, 2, drain_timeout_s)
    finally:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def group(directory: Path, count: int = 2) -> AsyncIterator[Group]:
    uds = str(directory / "uds")
    script = (
        "import asyncio, sys\n"
        "from frontend.processes.parent import Parent\n"
        f"command = [sys.executable, '-m', 'tests.unit.frontend.processes.member', "
        f"{str(directory)!r}, {uds!r}]\n"
        f"sys.exit(asyncio.run(Parent(command, {count}, 1.0).run()))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT)
    made = Group(process, uds)
    try:
        yield made
    finally:
        if process.returncode is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            await process.wait()
            await until(lambda: not any(map(is_running, children)))
            for arena in made.arenas():
                arena.unlink()


def test_the_unix_socket_goes_with_the_frontend(tmp_path: Path) -> None:
    async def run() -> None:
        async with group(tmp_path, 1) as made:
            await made.serves()
            made.process.terminate()
            await made.process.wait()

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def test_all_answer_on_one_socket_and_hear_of_each_other(tmp_path: Path) -> None:
    async with group(tmp_path, 3) as made:
        await made.serves()
        pids = [await made.pid(name) for name in "012"]
        assert len(set(pids)) == 3
        assert await made.ask_process("1", "all") == "{'0': b'I am 0', '2': b'I am 2'}"
        made.process.terminate()
        assert await made.process.wait() == 0
        assert not any(map(psutil.pid_exists, pids))
        assert not made.arenas()


async def test_what_one_has_put_into_the_arena_the_other_finds(tmp_path: Path) -> None:
    async with group(tmp_path) as made:
        await made.serves()
        assert await made.ask_process("1", "get picture") == "none"
        assert await made.ask_process("0", "put picture") == "done"
        assert await made.ask_process("1", "get picture") == "picture"


async def test_a_killed_process_is_replaced_and_finds_what_was_there(tmp_path: Path) -> None:
    async with group(tmp_path) as made:
        await made.serves()
        first, second = await made.pid("0"), await made.pid("1")
        assert await made.ask_process("0", "put picture") == "done"
        os.kill(first, signal.SIGKILL)
        assert int((await made.ask("name")).split()[1]) in (first, second)  # nobody is turned away
        assert await made.pid("0") not in (first, second)
        assert await made.pid("1") == second
        assert await made.ask_process("0", "get picture") == "picture"


async def test_one_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "silent-1").touch()
    async with group(tmp_path, 3) as made:
        await made.serves()
        await made.pid("1")
        hung = await made.pid("2")
        os.kill(hung, signal.SIGSTOP)
        try:
            assert await made.ask_process("0", "all") == "{}"
        finally:
            os.kill(hung, signal.SIGCONT)


async def test_one_that_is_stopped_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients waited without end for what it had accepted."""
    monkeypatch.setattr(child_module, "HEARTBEAT_S", 0.5)
    monkeypatch.setattr(child_module, "MISSED", 10_000)  # of one that only does not answer
    monkeypatch.setattr(parent_module, "FIRST_PAUSE_S", 0.01)
    async with parent_here(tmp_path, 0.2) as running:
        ended = asyncio.create_task(running.run())
        await until(lambda: len(running._serving) == 2)
        stopped, other = running._serving
        os.kill(stopped.pid, signal.SIGSTOP)
        await until(lambda: stopped not in running._children and len(running._serving) == 2)
        assert other in running._serving
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended == 0
    assert f"process {stopped.name} has been silent" in caplog.text


async def test_one_that_is_stopped_keeps_no_client_waiting_during_a_drain(tmp_path: Path) -> None:
    """It keeps its descriptors of the sockets that listen."""
    async with parent_here(tmp_path, 3600.0, on_port=True) as running:
        ended = asyncio.create_task(running.run())
        await until(lambda: len(running._serving) == 2)
        address = running._listeners[0].getsockname()
        stopped = next(iter(running._serving))
        os.kill(stopped.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: refuses(address))
        assert stopped in running._children
        os.kill(stopped.pid, signal.SIGKILL)
        assert await ended == 128 + signal.SIGKILL


def refuses(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_one_that_is_stopped_before_it_plans_ends_the_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All others waited without end for what it would say."""
    monkeypatch.setattr(child_module, "START_S", 0.5)
    (tmp_path / "fail").write_text(str(-signal.SIGSTOP))
    async with parent_here(tmp_path, 0.2) as running:
        assert await running.run() == 128 + signal.SIGKILL
    assert "process 0 did not start in 0.5 s" in caplog.text


async def test_an_answer_that_fails_is_left_out_and_ends_nobody(tmp_path: Path) -> None:
    async with group(tmp_path) as made:
        await made.serves()
        pids = [await made.pid(name) for name in "01"]
        assert await made.ask_process("0", "odd") == "{}"
        assert [await made.pid(name) for name in "01"] == pids


async def test_an_answer_that_is_too_large_is_left_out_and_ends_nobody(tmp_path: Path) -> None:
    async with group(tmp_path) as made:
        await made.serves()
        pids = [await made.pid(name) for name in "01"]
        assert await made.ask_process("0", f"much {LARGEST}") == "[]"
        assert [await made.pid(name) for name in "01"] == pids


@pytest.mark.parametrize("when", ["fail", "fail-later"])
async def test_if_none_can_serve_the_parent_ends_with_their_status(
    when: str, tmp_path: Path
) -> None:
    (tmp_path / when).write_text("7")
    async with group(tmp_path) as made:
        async with asyncio.timeout(120):
            assert await made.process.wait() == 7
        assert not made.arenas()


async def test_where_nobody_can_listen_the_parent_ends(tmp_path: Path) -> None:
    (tmp_path / "uds").mkdir()
    async with group(tmp_path) as made:
        async with asyncio.timeout(120):
            assert await made.process.wait() == ListenError.exit_status
        assert (tmp_path / "uds").is_dir()  # what is not ours is left alone


async def test_children_of_a_killed_parent_drain_and_the_arena_goes(tmp_path: Path) -> None:
    """What tells them must not count as a first and a second signal."""
    busy = tmp_path / "busy-0"
    busy.touch()
    async with group(tmp_path) as made:
        await made.serves()
        pids = [await made.pid(name) for name in "01"]
        made.process.kill()
        await made.process.wait()
        await until(lambda: not any(map(psutil.pid_exists, pids)))
        await until(lambda: not made.arenas())
    assert busy.read_text() == "drained"


async def test_a_child_that_is_told_to_end_is_replaced(tmp_path: Path) -> None:
    """One after the other can be restarted so."""
    async with group(tmp_path) as made:
        await made.serves()
        first = await made.pid("0")
        await made.pid("1")
        os.kill(first, signal.SIGTERM)
        await until(lambda: not psutil.pid_exists(first))
        assert await made.pid("0") != first


async def test_signals_to_all_at_once_end_all_once(tmp_path: Path) -> None:
    """As a service manager sends them."""
    async with group(tmp_path) as made:
        await made.serves()
        pids = [await made.pid(name) for name in "01"]
        for pid in (*pids, made.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert await made.process.wait() == 0


async def test_one_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "LAST_S", 0.2)
    (tmp_path / "deaf-1").touch()
    async with parent_here(tmp_path, 0.2) as running:
        ended = asyncio.create_task(running.run())
        await until(lambda: len(running._serving) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended == 128 + signal.SIGKILL


async def test_a_signal_while_a_child_is_being_started_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Child.start

    async def interrupted(*args: Any) -> Child:
        child = await start(*args)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(running._stopping.is_set)
        return child

    monkeypatch.setattr(Child, "start", interrupted)
    async with parent_here(tmp_path, 3600.0) as running:
        assert await running.run() == 0


async def test_a_host_that_is_full_for_a_while_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Child.start
    failures = [errno.EAGAIN, errno.ENOMEM]

    async def full(*args: Any) -> Child:
        if failures:
            error = failures.pop()
            raise OSError(error, os.strerror(error))
        return await start(*args)

    monkeypatch.setattr(parent_module, "FIRST_PAUSE_S", 0.01)
    async with parent_here(tmp_path, 0.2) as running:
        ended = asyncio.create_task(running.run())
        await until(lambda: len(running._serving) == 2)
        monkeypatch.setattr(Child, "start", full)
        next(iter(running._serving)).kill()
        await until(lambda: not failures and len(running._serving) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended == 0


async def test_where_no_process_comes_back_the_parent_ends(tmp_path: Path) -> None:
    """Or clients would wait for ever in front of a port that nobody accepts from."""
    async with group(tmp_path) as made:
        await made.serves()
        pids = [await made.pid(name) for name in "01"]
        (tmp_path / "fail").write_text("7")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            assert await made.process.wait() == 7


async def test_one_that_is_killed_while_none_serves_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The frontend ended: the second kill met the restart after the first."""
    monkeypatch.setattr(parent_module, "FIRST_PAUSE_S", 0.01)
    async with parent_here(tmp_path, 0.2) as running:
        ended = asyncio.create_task(running.run())
        await until(lambda: len(running._serving) == 2)
        killed = tmp_path / "fail"
        killed.write_text(str(-signal.SIGKILL))
        for child in list(running._serving):
            child.kill()
        await until(lambda: caplog.text.count("ended with status 137") >= 4)
        killed.unlink()
        await until(lambda: len(running._serving) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended == 0


async def test_one_that_is_killed_before_it_serves_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fail-0").write_text(str(-signal.SIGKILL))
    async with parent_here(tmp_path, 0.2) as running:
        assert await running.run() == 128 + signal.SIGKILL
    assert "process 0 ended with status 137 before it served" in caplog.text


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ([], {}),
        (["--processes", "1"], {}),
        (["--processes", "0"], {}),
        (["--processes", "65"], {}),
        (["--processes", "x"], {}),
        (["--processes"], {}),
        (["--processes", "2", "--help"], {}),
        (["--processes", "1"], {"MMROUTER_PROCESSES": "2"}),
        (["--processes", "2"], {MEMBER: "1 0 2 3"}),
    ],
)
def test_one_process_and_what_cannot_be_are_left_to_the_frontend(
    argv: list[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert parent_module.run_processes(argv) is None


def test_how_many_may_stand_in_the_file_and_have_vllms_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    class Told:
        def __init__(self, command: list[str], count: int, drain_timeout_s: float) -> None:
            counts.append(count)

        async def run(self) -> int:
            return 7

    monkeypatch.setattr(parent_module, "Parent", Told)
    monkeypatch.setattr(parent_module, "configure_logging", lambda *_: None)
    file = tmp_path / "f.yaml"
    file.write_text("processes: 2\nport: 9000")
    assert parent_module.run_processes([f"--config={file}"]) == 7
    assert parent_module.run_processes([f"--config={file}", "--api-server-count", "3"]) == 7
    file.write_text("processes: many")
    assert parent_module.run_processes([f"--config={file}"]) is None
    assert counts == [2, 3]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", None])
def test_listening_on_hosts(host: str | None) -> None:
    listeners = listen(host, 0, None)
    try:
        ports = [listener.getsockname()[1] for listener in listeners]
        with socket.create_connection(("127.0.0.1", ports[0])):
            pass
        with pytest.raises(ListenError, match=f"{ports[0]}"):
            listen("127.0.0.1", ports[0], None)
    finally:
        for listener in listeners:
            listener.close()


def test_a_unix_socket_that_was_left_is_taken_over_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "uds"
    with contextlib.closing(listen(None, 0, str(path))[0]):
        path.chmod(0o600)
    with contextlib.closing(listen(None, 0, str(path))[0]):
        assert path.stat().st_mode & 0o777 == 0o600
