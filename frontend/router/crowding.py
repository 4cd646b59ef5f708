"""End a request whose answers fill the KV cache of an engine while other clients wait.

An engine makes room for answers as they grow, and takes it from no request that came earlier. 64
choices of 2,000 tokens, asked for in 90 bytes, kept a cache full for four minutes: other requests
waited for two of these, or got 503. Plain vLLM does so too. A client's own requests may wait for
each other, as those of a benchmark do that fills a small GPU.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from common.errors import RequestRejectedError
from common.identity import Target
from frontend.request_context import Tenant, current_context
from frontend.router.decision import Decision
from frontend.router.selection import LoadTracker

MAX_SHARE: Final = 1 / 2
"""Fraction of an engine's KV cache that the answers of one request may fill while others wait."""

FEW: Final = 16
"""Choices, or answers to prompts, that may fill a cache: as many chats would."""

FULL: Final = 0.9
"""Fraction in use from which requests wait for room; routers refuse new ones soon after."""

PATIENCE_S: Final = 1.0
"""Seconds that another client waits for its first token, or since one was refused."""

POLL_INTERVAL_S: Final = 0.25
"""Interval between looks at the answers in flight."""

Client: TypeAlias = tuple[Tenant, str]
"""An API key, and the address of a host or proxy."""


class NewTokens(Protocol):
    """Fields of vLLM's ``CompletionOutput`` that the count needs."""

    index: int
    token_ids: Sequence[int]
    finish_reason: str | None


class Asker(NamedTuple):
    """An HTTP request on one target. The ids of its calls, one a prompt, begin with its name."""

    name: str
    target: Target
    client: Client


class Crowding:
    """Answers of this frontend's requests that grow in the KV caches of engines."""

    def __init__(self, clock: Callable[[], float], load: LoadTracker) -> None:
        self._clock = clock
        self._load = load
        self._answers: dict[GrowingAnswer, None] = {}
        self._refused: dict[Client, float] = {}
        self._looked_at = -math.inf
        self._crowds: dict[Asker, str] = {}

    def refused(self) -> None:
        """Note that this task's request was refused since all workers are busy."""
        client = _client()
        self._refused.pop(client, None)
        self._refused[client] = self._clock()
        if len(self._refused) > 2:  # of two clients one is another than any asker
            del self._refused[next(iter(self._refused))]

    def answer(self, decision: Decision, choices: int) -> "GrowingAnswer":
        """Count one call of this task's request, of whose answer nothing has come."""
        asker = Asker(decision.request_id.partition(".")[0], decision.target, _client())
        answer = GrowingAnswer(self, asker, decision.prompt_tokens, choices, self._clock())
        self._answers[answer] = None
        return answer

    def ended(self, answer: "GrowingAnswer") -> None:
        del self._answers[answer]

    def check(self, asker: Asker) -> None:
        """Raise RequestRejectedError if answers of a request fill a cache while others wait."""
        now = self._clock()
        if now - self._looked_at >= POLL_INTERVAL_S:
            self._looked_at = now
            self._look(now - PATIENCE_S)
        if self._crowds and (reason := self._crowds.get(asker)) is not None:
            raise RequestRejectedError(reason)

    def _look(self, recently: float) -> None:
        self._refused = {each: at for each, at in self._refused.items() if at >= recently}
        waiting = {
            (each.asker.target, each.asker.client)
            for each in self._answers
            if each.waits_since is not None and each.waits_since <= recently
        }
        self._crowds = {}
        if not waiting and not self._refused:
            return
        of_asker: dict[Asker, list[GrowingAnswer]] = {}
        for each in self._answers:
            of_asker.setdefault(each.asker, []).append(each)
        for asker, answers in of_asker.items():
            others = {client for target, client in waiting if target == asker.target}
            if (others | self._refused.keys()) - {asker.client}:
                self._judge(asker, answers)

    def _judge(self, asker: Asker, answers: Sequence["GrowingAnswer"]) -> None:
        choices = sum(each.choices for each in answers)
        tokens = sum(each.tokens for each in answers)
        capacity, in_use = self._load.kv_cache(asker.target)
        if choices > FEW and 0 < MAX_SHARE * capacity < tokens and in_use >= FULL:
            self._crowds[asker] = (
                f"the {choices} choices of the request, or answers to its prompts, have {tokens} "
                f"tokens in a worker's KV cache of {capacity}, and keep other clients waiting: ask "
                "for fewer (`n`, prompts), lower `max_tokens`, or send several requests"
            )


class GrowingAnswer:
    """Choices of one call that have not ended, their tokens, and since when none has come."""

    def __init__(
        self, crowding: Crowding, asker: Asker, prompt_tokens: int, choices: int, now: float
    ) -> None:
        self._crowding = crowding
        self._of_choice: Counter[int] = Counter()
        self.asker = asker
        self.tokens = prompt_tokens
        self.choices = choices
        self.waits_since: float | None = now

    def end(self) -> None:
        self._crowding.ended(self)

    def grow(self, outputs: Iterable[NewTokens]) -> None:
        """Count an output. Raises RequestRejectedError if others wait for the room it takes."""
        self.waits_since = None
        for one in outputs:
            self.tokens += len(one.token_ids)
            self._of_choice[one.index] += len(one.token_ids)
            if one.finish_reason is not None:
                self.choices -= 1
                self.tokens -= self._of_choice.pop(one.index)
        self._crowding.check(self.asker)


def _client() -> Client:
    context = current_context()
    return context.tenant, context.peer
