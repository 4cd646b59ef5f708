"""One family under fire: a worker, a frontend, and clients who send odd requests."""

import asyncio
import json
import random
import time
from collections import Counter, deque
from pathlib import Path

import httpx
import msgspec
import psutil

from tests.e2e.processes import HttpServer, Process, engine_pid, start_frontend, start_worker
from tests.families.case import DEMO
from tests.families.fuzz.targets import Body, Sent, Target
from tests.families.stack import BLOCKS, MEDIA

CLIENTS = 4
ANSWER_S = 120.0
HANG_UP_S = 0.3
SHORTER = "--max-model-len=2048"

RECENT = 12
"""Requests that were just answered, since one that ends an engine may be."""


ANSWERS = (501, 502)
"""5xx that are answers: what a fleet does not do, and what workers could not do for an operator."""


class Tally(msgspec.Struct):
    """What happened.

    Attributes:
        requests: sent; statuses says what became of them, 0 where the client hung up.
        server_errors: other 5xx than ``ANSWERS``, by message.
        engines_died, frontends_died: with the requests that were on their way, in files.
        unanswered: requests that took longer than two minutes.
        wrong_afterwards: families that did not answer as before.
    """

    seed: int
    requests: int = 0
    statuses: dict[str, int] = {}
    server_errors: dict[str, int] = {}
    engines_died: int = 0
    frontends_died: int = 0
    unanswered: int = 0
    wrong_afterwards: int = 0

    def count(self, status: int, text: str) -> None:
        self.requests += 1
        self.statuses[str(status)] = self.statuses.get(str(status), 0) + 1
        if status >= 500 and status not in ANSWERS:
            self.server_errors[text[:300]] = self.server_errors.get(text[:300], 0) + 1


def _runs(pid: int) -> bool:
    """Whether a process is there, and not merely unburied."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _rounded(number: str) -> float:
    """What is pooled may differ in the last digits if a part of it was in the cache."""
    return round(float(number), 3)


class Siege:
    """Everything of one family."""

    def __init__(
        self, target: Target, model: Path, directory: Path, kept: Path, seed: int, *flags: str
    ) -> None:
        """
        Args:
            directory: for logs and cards.
            kept: where what was found is left.
            flags: of frontends.
        """
        self.target = target
        self._flags = flags
        self.case = case = target.case
        self.model = model
        self.directory = directory
        self.kept = kept
        self._draw = random.Random(f"{case.name}-{seed}")
        self._on_their_way: dict[int, tuple[str, Body]] = {}
        self._recent: deque[tuple[str, Body]] = deque(maxlen=RECENT)
        self._names: Counter[str] = Counter()
        target.prepare(directory)
        self._start()

    def _start(self) -> None:
        number = self._names["worker"] = self._names["worker"] + 1
        name = f"{self.case.name}-{number}"
        self.cards = self.directory / f"cards-{number}"
        drawn = () if self.case.maker == DEMO else ("--load-format=sharded_state",)
        case = self.case.within(self.directory)
        flags = (MEDIA, BLOCKS, *drawn, *case.flags, SHORTER)
        env = self.target.env
        self.worker: Process = start_worker(
            f"{name}-worker", self.model, self.cards, self.directory, *flags, env=env
        )
        self.frontend: HttpServer = start_frontend(
            f"{name}-frontend",
            self.cards,
            self.directory,
            *case.both,
            *self._flags,
            env=env,
        )

    def wait(self) -> None:
        self.frontend.wait_for_status(200)  # a worker without a prefix cache is never exact
        self.engine = engine_pid(self.cards, self.worker.name)
        self.said = self._sane()

    def _sane(self) -> str:
        path, body = self.target.sane
        reply = httpx.post(f"{self.frontend.url}{path}", json=body, timeout=ANSWER_S)
        if reply.status_code != 200:
            return reply.text
        answer = json.loads(reply.text, parse_float=_rounded)
        return str(answer.get("choices") or answer["data"])

    def stop(self) -> None:
        self.frontend.stop()
        self.worker.stop()

    async def run(self, until: float, tally: Tally) -> None:
        """Until a moment of the monotonic clock; who dies is started again."""
        while time.monotonic() < until:
            fallen = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(until, fallen, tally))
                for _ in range(CLIENTS):
                    group.create_task(self._client(until, fallen, tally))
            if fallen.is_set():
                await asyncio.to_thread(self._again)
        if (now := await asyncio.to_thread(self._sane)) != self.said:
            tally.wrong_afterwards += 1
            print(f"{self.case.name}: was {self.said[:300]}, is {now[:300]}", flush=True)

    def _again(self) -> None:
        self.stop()
        self._on_their_way.clear()
        self._start()
        self.wait()

    async def _watch(self, until: float, fallen: asyncio.Event, tally: Tally) -> None:
        while time.monotonic() < until and not fallen.is_set():
            if not (_runs(self.engine) and self.worker.is_alive()):
                tally.engines_died += 1
                self._keep("engine")
                fallen.set()
            elif not self.frontend.is_alive():
                tally.frontends_died += 1
                self._keep("frontend")
                fallen.set()
            await asyncio.sleep(0.2)

    def _keep(self, who: str) -> None:
        path = self.kept / f"{self.case.name}-{who}-{time.time_ns()}.json"
        path.write_text(json.dumps([*self._on_their_way.values(), *self._recent]))
        log = self.worker if who == "engine" else self.frontend
        path.with_suffix(".log").write_text(log.tail(200))
        print(f"{self.case.name}: a dead {who}; see {path}", flush=True)

    async def _client(self, until: float, fallen: asyncio.Event, tally: Tally) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_S, base_url=self.frontend.url) as client:
            while time.monotonic() < until and not fallen.is_set():
                path, body = self._next()
                key = id(body)
                self._on_their_way[key] = path, body
                try:
                    await self._send(client, path, body, tally)
                except httpx.TimeoutException:
                    tally.unanswered += 1
                    (self.kept / f"slow-{time.time_ns()}.json").write_text(json.dumps(body))
                except httpx.TransportError:
                    await asyncio.sleep(1)  # the watch sees why
                self._recent.append((path, body))
                self._on_their_way.pop(key, None)

    def _next(self) -> Sent:
        path, body = self.target.draw(self._draw)
        where = body.get("lora_path")
        if isinstance(where, str):
            body["lora_path"] = where.replace("{dir}", str(self.directory))
        return path, body

    async def _send(self, client: httpx.AsyncClient, path: str, body: Body, tally: Tally) -> None:
        # What JSON does not have, clients in Python send all the same.
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        sent = client.post(path, content=content, headers={"Content-Type": "application/json"})
        if self._draw.random() < 0.05:
            try:
                async with asyncio.timeout(HANG_UP_S):
                    reply = await sent
            except TimeoutError:
                return tally.count(0, "")
        else:
            reply = await sent
        status = reply.status_code
        tally.count(status, reply.text)
        if status >= 500 and status not in ANSWERS:
            found = self.kept / f"{self.case.name}-{status}-{time.time_ns()}.json"
            found.write_text(json.dumps({"path": path, "body": body, "said": reply.text[:2000]}))
        return None
