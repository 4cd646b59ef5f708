"""For all tests: nothing fails by chance, or because the machine is slow.

Some processes share the tests (pytest-xdist), so no test may look at what all processes of the
machine have: only at its own, and at those it started.
"""

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


OWN_ENGINES = (
    "test_launch_script",
    "test_canaries",
    "test_families",
    "test_gpuless",
    "test_processes",
    "test_apart_faults",
    "test_status_page",
    "test_worker_flags",
    "test_fuzz_requests",
    "test_access",
    "test_speech",
    "test_more_families",
    "test_pooling",
    "test_ranks",
    "test_traces",
    "test_frontend_loss",
    "test_apart",
)
"""End-to-end tests that use none of the engines that the others share, the longest first."""
MAX_OWN_ENGINES = 2
"""Processes that run such tests at a time."""


def _has_own_engines(module: str) -> bool:
    return module.startswith("tests/e2e/") and Path(module).stem in OWN_ENGINES


def runs_engines(modules: dict[str, dict[str, bool]]) -> bool:
    """Whether a process has tests with engines of their own before it."""
    return any(_has_own_engines(name) and not all(modules[name].values()) for name in modules)


def _place(item: pytest.Item) -> int:
    """Return a sort key: the longest modules first, so that none of them is the last to end."""
    name = item.path.stem
    return (
        OWN_ENGINES.index(name)
        if _has_own_engines(item.nodeid.partition("::")[0])
        else len(OWN_ENGINES)
    )


class SharedEngines(LoadScopeScheduling):
    """Tests that share engines go to one process. Modules with engines of their own go to at most
    two processes at a time, so that memory suffices; other modules go to any free process.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if module.startswith("tests/e2e/") and not _has_own_engines(module):
            return "shared engines"
        return module

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give the process the first module that it may have, or let it end if there is none. It
        begins a test when it knows the next one, so it needs two.
        """
        scope = next((name for name in self.workqueue if self._may_have(node, name)), None)
        if scope is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)
        if self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

    def _may_have(self, node: WorkerController, scope: str) -> bool:
        if not _has_own_engines(scope):
            return True
        busy = [each for each, modules in self.assigned_work.items() if runs_engines(modules)]
        return node in busy or len(busy) < MAX_OWN_ENGINES

    def remove_node(self, node: WorkerController) -> str | None:
        """A test that ends its process is not run again, as it would be, up to eight times. Nor
        are modules that are done given to the next process, which would wait for the end of the
        first of them for ever.
        """
        modules = self.assigned_work[node]
        crashed = next(
            (name for tests in modules.values() for name in tests if not tests[name]), None
        )
        for tests in modules.values():
            if crashed in tests:
                tests[crashed] = True
        self.assigned_work[node] = {
            name: tests for name, tests in modules.items() if not all(tests.values())
        }
        super().remove_node(node)
        return crashed


def pytest_configure() -> None:
    """Undo ``nohup``: tests and the processes that they start would ignore SIGHUP too."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without garbage collections: a fifth of the time is looking through what stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """What was imported until here is never garbage: without it, each full collection of a test
    walks all of vLLM and PyTorch, which takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Called before processes are started that share the tests."""
    from tests.forked_workers import fork_workers

    fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SharedEngines:
    """Called where ``-n`` is given."""
    return SharedEngines(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Named at once, since a run that is ended from outside prints no summary."""
    print(f"\n{crashitem}: {report.longrepr}", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs about text that is none must get from one process to the other."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """What vLLM's server imports while a test runs sets the level of all logs, and a later test
    would not see the line that it looks for."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A frontend sets variables of its process, which later tests would see."""
    before = dict(os.environ)
    yield
    os.environ |= before
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
