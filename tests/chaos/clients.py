"""Users: what they ask for, what they got, and what they would have got undisturbed."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from tests.chaos.fleet import STALL_S, WORKER_WAIT_S, Fleet, Frontend
from tests.pictures import data_uri, picture

SILENCE_S = WORKER_WAIT_S + 2 * STALL_S
"""Without a byte for so long, a request hangs. Longer than all time limits of the fleet."""

REQUEST_TIMEOUT_S = 4 * WORKER_WAIT_S

ALIKE = "everybody"
"""The id that many requests bear at the same time: clients choose as they like."""

ALIKE_SHARE = 1 / 3
PROBE_TOKENS = 3
RESEND_PAUSE_S = 0.2


class Outcome(StrEnum):
    """What became of a request, in the words of the report."""

    CORRECT = "correct"
    WRONG = "wrong"
    REJECTED = "rejected"
    LOST = "lost"
    HUNG = "hung"
    LEFT = "left"


@dataclass(frozen=True)
class Prompt:
    """A request whose answer is determined: greedy, or sampled with a seed."""

    number: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer that came to its end."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Refused:
    """An answer that never began, with the reason."""

    status: int
    reason: str


@dataclass(frozen=True)
class Broken:
    """An answer that ended before its end."""

    why: str


Result = Answer | Refused | Broken


class CutError(Exception):
    """The connection to the frontend broke.

    Attributes:
        begun: whether the answer had begun.
    """

    def __init__(self, why: str, *, begun: bool) -> None:
        super().__init__(why)
        self.begun = begun


def make_prompts(count: int, random_: random.Random) -> list[Prompt]:
    """Requests about one or two pictures each; pictures come back in other prompts."""
    pictures = [data_uri(picture(f"chaos-{n}", (280, 280))) for n in range(count // 2)]
    prompts = []
    for number in range(count):
        shown = random_.sample(pictures, random_.choice((1, 1, 2)))
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": uri}} for uri in shown
        ]
        content.append({"type": "text", "text": f"Story {number} about what you see, please."})
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": random_.randint(20, 120),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        match number % 5:
            case 1:
                body |= {"temperature": 0.9, "seed": number}
            case 2:
                del body["stream"], body["stream_options"]
        prompts.append(Prompt(number, body))
    return prompts


def fresh_prompt(name: str) -> Prompt:
    """About a picture that nobody has seen, so that it must travel; a short answer."""
    url = data_uri(picture(f"fresh-{name}", (280, 280)))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": PROBE_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    return Prompt(-1, body)


async def ask(
    http: aiohttp.ClientSession,
    frontend: Frontend,
    prompt: Prompt,
    leave_after: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Result | None:
    """Send a prompt and read its answer; None if we left after so many events.

    Raises:
        CutError: the connection broke.
        TimeoutError: nothing came any more.
    """
    limits = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_read=SILENCE_S)
    url = f"{frontend.url}/v1/chat/completions"
    begun = False
    try:
        async with http.post(url, json=prompt.body, timeout=limits, headers=headers) as reply:
            begun = True
            if reply.status != 200:
                error = json.loads(await reply.text())["error"]
                return Refused(reply.status, error["message"])
            if "stream" not in prompt.body:
                return _whole(await reply.json())
            return await _streamed(reply, leave_after)
    except aiohttp.ServerTimeoutError as error:
        raise TimeoutError from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise CutError(repr(error), begun=begun) from error


def _whole(reply: dict[str, Any]) -> Answer:
    (choice,) = reply["choices"]
    return Answer(
        choice["message"]["content"], choice["finish_reason"], reply["usage"]["completion_tokens"]
    )


async def _streamed(reply: aiohttp.ClientResponse, leave_after: int | None) -> Result | None:
    text, finish_reason, tokens, events = "", None, 0, 0
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            if finish_reason is None:
                return Broken("it was done but had no end")
            return Answer(text, finish_reason, tokens)
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            return Broken(event["error"]["message"])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish_reason = choice["finish_reason"] or finish_reason
        events += 1
        if events == leave_after:
            reply.close()
            return None
    return Broken("the stream ended without an end")


@dataclass
class Tally:
    """What came of all requests.

    Attributes:
        resent: requests sent again because their frontend was killed or didn't take them.
        alike: requests under an id that others bear too.
        complaints: what was wrong with those that were not right.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    resent: int = 0
    alike: int = 0
    complaints: Counter[str] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return self.outcomes.total()

    def add(self, outcome: Outcome, complaint: str = "") -> None:
        self.outcomes[outcome] += 1
        if complaint:
            self.complaints[f"{outcome}: {complaint}"] += 1


def _excused(frontend: Frontend, deaths: int, shortages: int, error: CutError) -> bool:
    """Whether a connection broke since its frontend was killed, or could take none.

    Args:
        deaths, shortages: of the frontend, before.
    """
    died = frontend.down or frontend.deaths != deaths
    short = frontend.short or frontend.shortages != shortages
    return died or (short and not error.begun)


class Clients:
    """Users who ask at random, each one request after the other."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: Sequence[Prompt],
        expected: dict[int, Answer],
        random_: random.Random,
        pause_s: float,
        alike_share: float,
    ) -> None:
        self.tally = Tally()
        self.enough = asyncio.Event()
        self._fleet = fleet
        self._prompts = prompts
        self._expected = expected
        self._random = random_
        self._pause_s = pause_s
        self._alike_share = alike_share

    async def one(self) -> None:
        """A user, until there is enough."""
        while not self.enough.is_set():
            await self.request(self._random.choice(self._prompts), leaves=True)
            await asyncio.sleep(self._random.uniform(0, 2 * self._pause_s))

    async def request(self, prompt: Prompt, *, leaves: bool) -> None:
        """One request, counted. It goes to the other frontend when its own dies or is full,
        as a load balancer would have it."""
        frontends = self._random.sample(self._fleet.frontends, 2)
        leave_after = None
        if leaves and "stream" in prompt.body and self._random.random() < 0.05:
            leave_after = self._random.randint(1, 10)
        refused: Refused | None = None
        sent, headers = self._named(prompt)
        while frontends:
            frontend = frontends.pop(0)
            deaths, shortages = frontend.deaths, frontend.shortages
            try:
                result = await ask(self._fleet.http, frontend, sent, leave_after, headers)
            except TimeoutError:
                self.tally.add(Outcome.HUNG, f"prompt {prompt.number} at {frontend.name}")
                return
            except CutError as error:
                if not _excused(frontend, deaths, shortages, error):
                    self.tally.add(Outcome.LOST, f"{frontend.name}: {error}")
                    return
                self.tally.resent += 1
                await asyncio.sleep(RESEND_PAUSE_S)
                frontends = frontends or [self._fleet.survivor]
                continue
            if isinstance(result, Refused) and result.status in (429, 503):
                refused = result
                continue
            self._judge(prompt, frontend, result)
            return
        assert refused is not None
        self.tally.add(Outcome.REJECTED, f"{refused.status} {refused.reason}")

    async def probe(self, frontend: Frontend, name: str) -> None:
        """Ask one frontend about a picture that must travel, and count what comes of it."""
        deaths, shortages = frontend.deaths, frontend.shortages
        prompt = fresh_prompt(name)
        try:
            result = await ask(self._fleet.http, frontend, prompt)
        except TimeoutError:
            self.tally.add(Outcome.HUNG, f"a new picture at {frontend.name}")
        except CutError as error:
            if not _excused(frontend, deaths, shortages, error):
                self.tally.add(Outcome.LOST, f"{frontend.name}: {error}")
        else:
            if isinstance(result, Answer):
                whole = (result.finish_reason, result.tokens) == ("length", PROBE_TOKENS)
                complaint = "" if whole else f"a new picture at {frontend.name}: {result}"
                self.tally.add(Outcome.CORRECT if whole else Outcome.WRONG, complaint)
            else:
                self._judge(prompt, frontend, result)

    def _named(self, prompt: Prompt) -> tuple[Prompt, dict[str, str]]:
        """A prompt, some of them under the same id, in the header or in the body."""
        if self._random.random() >= self._alike_share:
            return prompt, {}
        self.tally.alike += 1
        if self._random.random() < 0.5:
            return prompt, {"X-Request-Id": ALIKE}
        return Prompt(prompt.number, prompt.body | {"request_id": ALIKE}), {}

    def _judge(self, prompt: Prompt, frontend: Frontend, result: Result | None) -> None:
        where = f"prompt {prompt.number} at {frontend.name}"
        match result:
            case None:
                self.tally.add(Outcome.LEFT)
            case Refused(status, reason):
                self.tally.add(Outcome.REJECTED, f"{where}: {status} {reason}")
            case Broken(why):
                self.tally.add(Outcome.LOST, f"{where}: {why}")
            case answer if answer == self._expected[prompt.number]:
                self.tally.add(Outcome.CORRECT)
            case answer:
                self.tally.add(
                    Outcome.WRONG, f"{where}: {answer} is not {self._expected[prompt.number]}"
                )
