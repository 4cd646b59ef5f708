"""A third worker comes, is killed in the middle of things, and nobody notices."""

import signal
import time
from pathlib import Path

from tests.e2e.conftest import Endpoint, Stack
from tests.e2e.processes import start_worker


def connected(router: Endpoint) -> set[str]:
    return {name for name, view in router.workers().items() if view["connected"]}


def wait_for(router: Endpoint, expected: set[str]) -> None:
    deadline = time.monotonic() + 120
    while connected(router) != expected:
        assert time.monotonic() < deadline, connected(router)
        time.sleep(0.1)


def test_a_killed_worker_disappears_and_requests_go_on(
    stack: Stack, router: Endpoint, tmp_path: Path
) -> None:
    here = connected(router)
    worker = start_worker("w2", stack.model, stack.discovery, tmp_path)
    try:
        wait_for(router, here | {"w2"})
        worker.signal(signal.SIGKILL)
        worker.wait()
        wait_for(router, here)
    finally:
        worker.stop()
    reply = router.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    assert reply.choices[0].message.content
