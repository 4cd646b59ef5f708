"""For all tests: nothing fails by chance, or because the machine is slow.

Some processes share the tests (pytest-xdist), so no test may look at what all processes of the
machine have: only at its own, and at those it started.
"""

import ast
import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

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
    "spied",
    "test_launch_script",
    "test_families",
    "test_gpuless",
    "test_worker_flags",
    "test_more_families",
    "test_pooling",
    "test_status_page",
    "test_ranks",
    "test_speech",
    "test_apart",
    "test_apart_faults",
    "test_traces",
    "test_processes",
    "test_frontend_loss",
    "test_access",
)
"""Modules and a folder of end-to-end tests that use none of the engines that the others share. The
two halves, every second each, take as much of the CPU."""


class SharedEngines(LoadScopeScheduling):
    """Tests that share engines go to one process, tests with engines of their own to two, so that
    memory suffices; other modules to whoever is free.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if not module.startswith("tests/e2e/"):
            return module
        name = module.removeprefix("tests/e2e/").partition("/")[0].removesuffix(".py")
        if name in OWN_ENGINES:
            return f"own engines {OWN_ENGINES.index(name) % 2}"
        return "shared engines"

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


@pytest.fixture(scope="session", autouse=True)
def parse_without_collections() -> Iterator[None]:
    """CPython before 3.11.8 fails with ``SystemError: AST constructor recursion depth mismatch``
    if a collection amid `ast.parse` ends an object that has something parsed itself, as printing
    the line of a warning does (its issue 106905).
    """
    parse = ast.parse

    def parse_at_once(*args: Any, **options: Any) -> ast.AST:
        gc.disable()
        try:
            return parse(*args, **options)
        finally:
            gc.enable()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ast, "parse", parse_at_once)
        yield


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
