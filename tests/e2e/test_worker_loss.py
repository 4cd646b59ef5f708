"""Processes that are killed: nobody notices, and nothing of theirs stays."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Endpoint, LetGo, Stack, wait_for_workers
from tests.e2e.lab import ask, image, text, words
from tests.e2e.processes import (
    card_path,
    engine_pid,
    shared_memory_of,
    start_frontend,
    start_worker,
    worker_pid,
)
from tests.pictures import data_uri, picture


def connected(router: Endpoint) -> set[str]:
    return {name for name, view in router.workers().items() if view["connected"]}


def wait_for(router: Endpoint, expected: set[str]) -> None:
    deadline = time.monotonic() + 120
    while connected(router) != expected:
        assert time.monotonic() < deadline, connected(router)
        time.sleep(0.1)


def test_a_killed_worker_disappears_and_requests_go_on(
    stack: Stack, router: Endpoint, tmp_path: Path, let_go: LetGo
) -> None:
    here = connected(router)
    worker = start_worker("w2", stack.model, stack.discovery, tmp_path)
    try:
        wait_for(router, here | {"w2"})
        os.kill(worker_pid(stack.discovery, "w2"), signal.SIGKILL)
        assert worker.wait() == 128 + signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.killpg(worker.pid, 0)  # its engine processes are gone too
        wait_for(router, here)
    finally:
        let_go(worker)
    reply = router.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    assert reply.choices[0].message.content


class Stream:
    """A long greedy answer about a picture, read up to some place."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.name = name
        content = [image(data_uri(picture(name))), words("Tell me a long story about it.")]
        self._events = endpoint.openai.chat.completions.create(  # type: ignore[call-overload]
            model="demo",
            messages=[{"role": "user", "content": content}],
            max_tokens=LONG,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        self.text = ""
        self.tokens: int | None = None
        self.finish_reason: str | None = None

    def read(self, letters: int | None = None) -> "Stream":
        """Read so many letters, or to the end."""
        for event in self._events:
            if event.usage is not None:
                self.tokens = event.usage.completion_tokens
            for choice in event.choices:
                self.text += choice.delta.content or ""
                self.finish_reason = choice.finish_reason or self.finish_reason
            if letters is not None and len(self.text) >= letters:
                break
        return self

    def leave(self) -> None:
        self._events.close()


LONG = 300


def metric(endpoint: Endpoint, name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels."""
    families = text_string_to_metric_families(endpoint.http.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@contextlib.contextmanager
def renewed(card: Path, directory: Path) -> Iterator[None]:
    """A worker's card in another directory too, under a lease meanwhile."""
    copy = directory / card.name
    copy.touch(mode=0o600)
    copy.write_bytes(card.read_bytes())
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.5):
            os.utime(copy)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        copy.unlink()


def half_told(endpoint: Endpoint, engine: int, name: str) -> Stream:
    """A stream whose engine stands still amid its answer, however fast it is and slow we are."""
    for attempt in itertools.count():
        stream = Stream(endpoint, f"{name}-{attempt}").read(20)
        os.kill(engine, signal.SIGSTOP)
        # What it said before may be on its way still.
        settled = time.monotonic() + 2
        while endpoint.workers()["w2"]["active_requests"] and time.monotonic() < settled:
            time.sleep(0.1)
        if endpoint.workers()["w2"]["active_requests"]:
            return stream
        os.kill(engine, signal.SIGCONT)
    raise AssertionError("unreachable")


def test_an_answer_goes_on_when_its_worker_hangs_or_dies(
    stack: Stack, plain: Endpoint, tmp_path: Path, let_go: LetGo
) -> None:
    """The user sees the very stream that an undisturbed worker gives, and the worker is out
    until it has proved itself."""
    cards = tmp_path / "cards"
    doomed = start_worker("w2", stack.model, cards, tmp_path)
    rounds = {
        "engine-stopped": (signal.SIGSTOP, "stalled"),
        "stopped": (signal.SIGSTOP, None),  # its card runs out meanwhile
        "killed": (signal.SIGKILL, "died"),
    }
    # A worker that was lost stays out for a while: so each round has a frontend of its own.
    servers = {
        name: start_frontend(f"moving-{name}", cards, tmp_path, "--router-stall=10")
        for name in rounds
    }
    try:
        with renewed(card_path(stack.discovery, "w0"), cards):
            for name, (disturb, reason) in rounds.items():
                with contextlib.closing(Endpoint(servers[name].url)) as endpoint:
                    wait_for_workers(servers[name], [doomed])
                    wait_for(endpoint, {"w0", "w2"})
                    operate(endpoint, "drain")
                    pid, engine = worker_pid(cards, "w2"), engine_pid(cards, "w2")
                    disturbed = engine if name == "engine-stopped" else pid
                    stream = half_told(endpoint, engine, name)  # only w2 can be serving it
                    assert endpoint.workers()["w2"]["circuit"] == "closed"
                    operate(endpoint, "reinstate")
                    ejections = metric(endpoint, "mmrouter_ejections_total", reason=reason or "")
                    os.kill(disturbed, disturb)
                    stream.read()
                    expected = Stream(plain, stream.name).read()
                    assert stream.text == expected.text
                    assert stream.finish_reason == expected.finish_reason == "length"
                    assert stream.tokens == expected.tokens == LONG
                    assert metric(endpoint, "mmrouter_migrations_total", how="continued") == 1
                    if reason is not None:
                        now = metric(endpoint, "mmrouter_ejections_total", reason=reason)
                        assert now > ejections
                    assert metric(endpoint, "mmrouter_arena_leases") == 0
                    if disturb is signal.SIGSTOP:
                        os.kill(disturbed, signal.SIGCONT)
                        os.kill(engine, signal.SIGCONT)
                        wait_for(endpoint, {"w0", "w2"})
    finally:
        let_go(doomed, *servers.values())


def operate(endpoint: Endpoint, action: str) -> None:
    """Let the frontend send no more requests to w0, or again."""
    endpoint.http.post(f"/mmrouter/workers/w0/{action}").raise_for_status()


def test_who_leaves_stops_the_engine_and_gets_back_what_was_lent(
    stack: Stack, router: Endpoint
) -> None:
    stream = Stream(router, "left-alone").read(5)
    stream.leave()
    deadline = time.monotonic() + 30
    while any(view["running"] for view in router.workers().values()):
        assert time.monotonic() < deadline, router.workers()
        time.sleep(0.1)
    assert metric(router, "mmrouter_arena_leases") == 0


def test_a_killed_frontend_leaves_nothing_that_stays(
    stack: Stack, router: Endpoint, plain: Endpoint, tmp_path: Path
) -> None:
    """Its arena goes with the next process, and workers that had it mapped go on."""
    doomed = start_frontend("doomed", stack.discovery, tmp_path)
    try:
        wait_for_workers(doomed, list(stack.workers.values()))
        assert len(shared_memory_of(doomed.pid)) == 1
        endpoint = Endpoint(doomed.url)
        ask(endpoint, [image(data_uri(picture("doomed"))), words("What is this?")])
        endpoint.close()
        doomed.signal(signal.SIGKILL)
        doomed.wait()
    finally:
        doomed.stop()

    content = [image(data_uri(picture("after-the-doomed"))), words("What is this?")]
    assert text(ask(router, content)) == text(ask(plain, content))

    heir = start_frontend("heir", stack.discovery, tmp_path)
    try:
        heir.wait_for_status(200)
        assert not shared_memory_of(doomed.pid)
    finally:
        heir.stop()
    assert not shared_memory_of(heir.pid)


async def test_two_identical_prompts_at_once_go_to_one_worker(router: Endpoint) -> None:
    """Although no KV event can have come for the second. They are so long that computing one again
    elsewhere takes longer than to wait for half a step."""
    content = [image(data_uri(picture("at-once"))), words("What is this, twice? " * 80)]
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
                    max_tokens=4,
                )
                for _ in range(2)
            )
        )
    assert len({router.decision(answer.id)["worker_id"] for answer in answers}) == 1
