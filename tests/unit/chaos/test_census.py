"""The soak counts what leaks, and nothing else. Leaks of processes here are real ones."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import psutil
import pytest

from tests.chaos import census
from tests.chaos.planted import MEMORY_MIB, PLANTED, SHARED_MEMORY, TEMPORARY
from tests.chaos.report import Report, ReportFile
from tests.chaos.resources import MEMORY, Census, memory_mib, of_tree
from tests.chaos.watched import PLANT
from tests.waiting import until

ROOT: Final = Path(__file__).parents[3]

FORKED: Final = f"""
import os, signal
memory = bytearray(b"x" * ({MEMORY_MIB} << 20))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if os.fork() == 0:
    signal.sigwait([signal.SIGUSR1])
    memory[::4096] = b"y" * len(memory[::4096])
    os.write(1, b"written")
    signal.sigwait([signal.SIGUSR1])
    memory += bytes(memory)
    os.write(1, b"grown")
    signal.pause()
os.write(1, b"forked")
signal.pause()
"""
"""A process and a fork of it, which writes to all pages of its parent, and then takes more."""

ZOMBIE: Final = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(1, b"ready")
signal.sigwait([signal.SIGUSR1])
if os.fork() == 0:
    os._exit(0)
signal.pause()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory for temporary files is the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed in the end, with all that it started."""
    with process:
        try:
            yield process
        finally:
            for each in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.kill()


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def read(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 100)


class Watched:
    """A process that leaks when it is told to."""

    def __init__(self, pid: int, reports: ReportFile) -> None:
        self.pid = pid
        self._reports = reports

    async def report(self) -> Report:
        self._reports.forget()
        os.kill(self.pid, signal.SIGUSR2)
        await until(self._reports.read)
        report = self._reports.read()
        assert report is not None
        return report

    async def census(self, name: str) -> Census:
        return census.reported(name, of_tree(name, self.pid), await self.report())


def start_watched(directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.chaos.watched", str(directory / "report.json")]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(directory)})


@asynccontextmanager
async def watched(directory: Path) -> AsyncIterator[Watched]:
    reports = ReportFile(directory / "report.json")
    with ended(start_watched(directory)) as process:
        await until(reports.read)
        yield Watched(process.pid, reports)
        (SHARED_MEMORY / f"planted-{process.pid}").unlink(missing_ok=True)


async def test_each_kind_that_a_process_leaks_is_counted(tmp_path: Path) -> None:
    async with watched(tmp_path) as process:
        before = await process.census("worker w0") | census.files_left()
        os.kill(process.pid, PLANT)
        await until((SHARED_MEMORY / f"planted-{process.pid}").exists)
        after = await process.census("worker w0") | census.files_left()
        expected = {name for name in PLANTED if not name.startswith("frontend")}
        assert expected <= set(census.grown(before, after))


async def test_a_process_that_leaks_nothing_has_not_grown(tmp_path: Path) -> None:
    async with watched(tmp_path) as process:
        before = await process.census("frontend a")
        assert census.grown(before, await process.census("frontend a")) == []


async def test_an_engines_memory_is_counted_below_its_worker() -> None:
    with ended(python(FORKED)) as worker:
        assert read(worker) == b"forked"
        (engine,) = psutil.Process(worker.pid).children()
        names = {worker.pid: "worker w0", engine.pid: "worker w0: engine"}
        before = of_tree("worker w0", worker.pid, names)
        for step in (b"written", b"grown"):
            engine.send_signal(signal.SIGUSR1)
            assert read(worker) == step
        after = of_tree("worker w0", worker.pid, names)
        assert census.grown(before, after) == [f"worker w0: engine: {MEMORY}"]


def test_a_fork_that_writes_to_pages_of_its_parent_has_not_grown() -> None:
    """Its unique set has: that is what a soak took for a leak of an engine."""
    with ended(python(FORKED)) as parent:
        assert read(parent) == b"forked"
        (fork,) = psutil.Process(parent.pid).children()
        memory, unique = memory_mib(fork.pid), fork.memory_full_info().uss
        fork.send_signal(signal.SIGUSR1)
        assert read(parent) == b"written"
        assert fork.memory_full_info().uss - unique > census.GROWTH_MIB << 20
        assert memory_mib(fork.pid) - memory < census.STEADY_MIB


async def test_a_child_that_is_not_reaped_is_counted() -> None:
    with ended(python(ZOMBIE)) as parent:
        assert read(parent) == b"ready"
        before = of_tree("frontend a", parent.pid)
        os.kill(parent.pid, signal.SIGUSR1)

        def zombies() -> list[psutil.Process]:
            children = psutil.Process(parent.pid).children()
            return [each for each in children if each.status() == psutil.STATUS_ZOMBIE]

        await until(zombies)
        assert census.grown(before, of_tree("frontend a", parent.pid)) == ["frontend a: zombies"]


def test_a_process_that_stays_is_left_and_the_fork_server_is_not() -> None:
    with ended(subprocess.Popen(["sleep", "1234567"])) as process:
        assert "process sleep 1234567" in census.left({}, [None])
        assert "process sleep 1234567" not in census.left({}, [process.pid])


@pytest.mark.parametrize(("name", "granted"), [(census.MEETING_PLACES, 5), (census.SEMAPHORES, 2)])
def test_what_killed_engines_leave_is_granted_and_no_more(name: str, granted: int) -> None:
    before = census.with_left_by_killed({name: 3}, engines=5, groups=2)
    assert census.grown(before, {name: 3 + granted}) == []
    assert census.grown(before, {name: 4 + granted}) == [name]


def test_a_file_of_vllm_is_counted_and_the_compilers_cache_is_not(tmp_path: Path) -> None:
    (tmp_path / f"vllm_dist_{uuid4().hex}").touch()
    (tmp_path / "torchinductor_somebody").mkdir()
    found = {name: n for name, n in census.files_left().items() if name.startswith(TEMPORARY)}
    assert found == {census.MEETING_PLACES: 1}


@pytest.mark.parametrize("metric", census.WHILE_BUSY)
def test_a_metric_of_requests_that_is_not_zero_is_counted(metric: str) -> None:
    zero = {f"mmrouter_{each}": 0.0 for each in census.WHILE_BUSY}
    before = census.of_frontend("b", zero, [])
    after = census.of_frontend("b", zero | {f"mmrouter_{metric}": 1.0}, [])
    assert census.grown(before, after) == [f"frontend b: {metric}"]


def test_requests_and_workers_that_stay_are_counted() -> None:
    zero = {f"mmrouter_{each}": 0.0 for each in census.WHILE_BUSY}
    idle = {"active_requests": 0, "running": None, "waiting": None}
    before = census.of_frontend("a", zero, [idle])
    views = [idle | {"active_requests": 1, "running": 1}, idle | {"waiting": 1}]
    assert census.grown(before, census.of_frontend("a", zero, views)) == [
        "frontend a: workers",
        "frontend a: requests at workers",
        "frontend a: requests running",
        "frontend a: requests waiting",
    ]


class Memory:
    """Of an engine, after each load."""

    def __init__(self, *values: int) -> None:
        self._values = list(values)
        self.loads = 0

    async def load(self) -> None:
        self.loads += 1

    def measure(self) -> Census:
        return {f"engine: {MEMORY}": self._values[min(self.loads, len(self._values) - 1)]}


async def test_what_an_engine_takes_with_its_first_pictures_is_no_leak() -> None:
    engine = Memory(500, 540, 580, 583)
    await census.warm(engine.load, engine.measure)
    assert engine.loads == 3
    before = engine.measure()
    assert census.grown(before, {f"engine: {MEMORY}": 588}) == []


async def test_an_engine_that_grows_with_each_load_is_a_leak() -> None:
    engine = Memory(*range(500, 2000, census.STEADY_MIB + 1))
    await census.warm(engine.load, engine.measure)
    assert engine.loads == census.WARM_ROUNDS
    before = engine.measure()
    for _ in range(census.WARM_ROUNDS):
        await engine.load()
    assert census.grown(before, engine.measure()) == [f"engine: {MEMORY}"]
