"""Which process of tests gets which modules."""

from types import SimpleNamespace
from typing import Any

import pytest
from xdist.workermanage import WorkerController

from tests.conftest import MAX_OWN_ENGINES, OWN_ENGINES, SharedEngines, runs_engines

OWN = [f"tests/e2e/{name}.py" for name in OWN_ENGINES]
SHARED = ["tests/e2e/test_openai_api.py", "tests/e2e/clients/test_sdks.py"]
UNIT = [f"tests/unit/test_{number}.py" for number in range(9)]
TESTS = [f"{name}::test_{n}" for name in (*OWN, *SHARED, *UNIT) for n in range(1 + len(name) % 3)]


class Node:
    """A process of tests that keeps what it is told to run. It begins a test when it knows the
    next one, or that there is none.
    """

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.waiting: list[int] = []

    def send_runtest_some(self, tests: list[int]) -> None:
        self.waiting += tests

    def shutdown(self) -> None:
        self.shutting_down = True

    def runs_one(self) -> int | None:
        can = len(self.waiting) > int(not self.shutting_down)
        return self.waiting.pop(0) if can else None


class Run:
    """A run of some processes, of which one may crash."""

    def __init__(self, config: pytest.Config, processes: int) -> None:
        options = SimpleNamespace(tx=["popen"] * processes, px=[], loadscopereorder=False)
        given: Any = SimpleNamespace(option=options, getvalue=vars(options).get, hook=config.hook)
        self.scheduler = SharedEngines(given)
        self.done: list[str] = []
        self.by_node: dict[str, set[str]] = {}
        self.nodes: list[Any] = [Node(number) for number in range(processes)]
        for node in self.nodes:
            self.join(node)
        self.scheduler.schedule()

    def join(self, node: WorkerController) -> None:
        self.scheduler.add_node(node)
        self.scheduler.add_node_collection(node, TESTS)

    def replace(self, node: Any) -> None:
        self.nodes.remove(node)
        crashed = self.scheduler.remove_node(node)
        assert crashed is not None
        self.done.append(crashed)
        self.nodes.append(Node(len(TESTS)))
        self.join(self.nodes[-1])
        self.scheduler.schedule()

    def step(self) -> bool:
        """Run a test of each process that can; whether there was any."""
        if self.scheduler.tests_finished:
            for node in self.nodes:
                node.shutdown()
        ran = [(node, test) for node in self.nodes if (test := node.runs_one()) is not None]
        for node, test in ran:
            self.done.append(TESTS[test])
            self.by_node.setdefault(TESTS[test].partition("::")[0], set()).add(node.gateway.id)
            self.scheduler.mark_test_complete(node, test)
        return bool(ran)

    def with_own_engines(self) -> int:
        return sum(map(runs_engines, self.scheduler.assigned_work.values()))


@pytest.mark.parametrize("processes", [1, 2, 4, 9])
def test_all_is_run_once_and_memory_suffices(pytestconfig: pytest.Config, processes: int) -> None:
    run = Run(pytestconfig, processes)
    while run.step():
        assert run.with_own_engines() <= MAX_OWN_ENGINES
    assert sorted(run.done) == sorted(TESTS)
    assert len(run.by_node[SHARED[0]] | run.by_node[SHARED[1]]) == 1, "they share engines"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_process_that_crashes_is_replaced(pytestconfig: pytest.Config, processes: int) -> None:
    run = Run(pytestconfig, processes)
    run.step()
    run.replace(run.nodes[0])
    while run.step():
        assert run.with_own_engines() <= MAX_OWN_ENGINES
    assert sorted(run.done) == sorted(TESTS)
