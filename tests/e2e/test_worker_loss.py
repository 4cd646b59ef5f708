"""Processes that are killed: nobody notices, and nothing of theirs stays."""

import asyncio
import os
import signal
import time
from pathlib import Path

import openai
import pytest

from common.card import WorkerCard
from tests.e2e.conftest import Endpoint, Stack, wait_for_workers
from tests.e2e.processes import our_shared_memory, start_frontend, start_worker
from tests.e2e.test_scenarios import ask, image, text, words
from tests.pictures import data_uri, picture


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
        card = WorkerCard.from_json((stack.discovery / "w2.json").read_bytes())
        os.kill(card.host.pid, signal.SIGKILL)
        assert worker.wait() == 128 + signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.killpg(worker.pid, 0)  # its engine processes are gone too
        wait_for(router, here)
    finally:
        worker.stop()
    reply = router.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    assert reply.choices[0].message.content


def test_a_killed_frontend_leaves_nothing_that_stays(
    stack: Stack, router: Endpoint, plain: Endpoint, tmp_path: Path
) -> None:
    """Its arena goes with the next process, and workers that had it mapped go on."""
    before = our_shared_memory()
    doomed = start_frontend("doomed", stack.discovery, tmp_path)
    try:
        wait_for_workers(doomed, list(stack.workers.values()))
        endpoint = Endpoint(doomed.url)
        ask(endpoint, [image(data_uri(picture("doomed"))), words("What is this?")])
        endpoint.close()
        doomed.signal(signal.SIGKILL)
        doomed.wait()
    finally:
        doomed.stop()
    orphans = our_shared_memory() - before
    assert len(orphans) == 1

    content = [image(data_uri(picture("after-the-doomed"))), words("What is this?")]
    assert text(ask(router, content)) == text(ask(plain, content))

    heir = start_frontend("heir", stack.discovery, tmp_path)
    try:
        heir.wait_for_status(200)
        assert not our_shared_memory() & orphans
    finally:
        heir.stop()
    assert our_shared_memory() <= before, "others may clean up meanwhile"


async def test_two_identical_prompts_at_once_go_to_one_worker(router: Endpoint) -> None:
    """Although no KV event can have come for the second."""
    content = [image(data_uri(picture("at-once"))), words("What is this, twice?")]
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc,typeddict-item]
                    max_tokens=4,
                )
                for _ in range(2)
            )
        )
    assert len({router.decision(answer.id)["worker_id"] for answer in answers}) == 1
