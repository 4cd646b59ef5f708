"""End a request whose answers fill the KV cache of an engine while other requests wait.

An engine makes room for answers as they grow, and takes it from no request that came earlier. 64
choices of 2,000 tokens, asked for in 90 bytes, kept a cache full for four minutes: other requests
waited for two of these, or got 503. Plain vLLM does so too.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from vllm.outputs import CompletionOutput

from common.errors import RequestRejectedError
from common.identity import Target
from frontend.router.decision import Decision
from frontend.router.selection import LoadTracker

MAX_SHARE: Final = 1 / 2
"""Fraction of an engine's KV cache that the answers of one request may fill while others wait."""

FULL: Final = 0.9
"""Fraction in use from which requests wait for room; routers refuse new ones soon after."""

PATIENCE_S: Final = 1.0
"""Seconds that another request waits for its first token, or since one was refused."""

LOOK_S: Final = 0.25
"""Interval between looks at the requests that wait."""


class Asker(NamedTuple):
    """An HTTP request on one target. The ids of its calls, one a prompt, begin with its name."""

    name: str
    target: Target


class Crowding:
    """Tokens that the requests of this frontend have in the KV caches of engines."""

    def __init__(self, clock: Callable[[], float], load: LoadTracker) -> None:
        self._clock = clock
        self._load = load
        self._refused_at = self._looked_at = -math.inf
        self._tokens: Counter[Asker] = Counter()
        self._choices: Counter[Asker] = Counter()

    def refused(self) -> None:
        """Note that a request was refused since all workers are busy."""
        self._refused_at = self._clock()

    def answer(self, decision: Decision, choices: int) -> "GrowingAnswer":
        """Count one call, of whose answer nothing has come."""
        asker = Asker(decision.request_id.partition(".")[0], decision.target)
        return GrowingAnswer(self, asker, decision.prompt_tokens, choices)

    def add(self, asker: Asker, tokens: int, choices: int = 0) -> None:
        for counter, amount in ((self._tokens, tokens), (self._choices, choices)):
            counter[asker] += amount
            if not counter[asker]:
                del counter[asker]

    def check(self, asker: Asker) -> None:
        """Raise RequestRejectedError if answers of a request fill a cache while others wait."""
        capacity, in_use = self._load.kv_cache(asker.target)
        if self._choices[asker] < 2 or self._tokens[asker] <= MAX_SHARE * capacity or in_use < FULL:
            return
        now = self._clock()
        recently = now - PATIENCE_S
        if self._refused_at < recently:
            if now - self._looked_at < LOOK_S:
                return
            self._looked_at = now
            if not self._load.keeps_waiting(asker.target, recently, besides=asker.name):
                return
        raise RequestRejectedError(
            f"the {self._choices[asker]} choices of the request, or answers to its prompts, have "
            f"{self._tokens[asker]} tokens in a worker's KV cache of {capacity}, and keep other "
            "requests waiting: ask for fewer (`n`, prompts), lower `max_tokens`, or send several "
            "requests"
        )


class GrowingAnswer:
    """Tokens of one call, from its dispatch to :meth:`end`."""

    def __init__(self, crowding: Crowding, asker: Asker, prompt_tokens: int, choices: int) -> None:
        self._crowding = crowding
        self._asker = asker
        self._left = choices
        self._tokens = prompt_tokens
        self._of_choice: Counter[int] = Counter()
        crowding.add(asker, prompt_tokens, choices)

    def end(self) -> None:
        self._crowding.add(self._asker, -self._tokens, -self._left)

    def grow(self, outputs: Sequence[CompletionOutput]) -> None:
        """Count an output. Raises RequestRejectedError if others wait for the room it takes."""
        tokens = ended = 0
        for one in outputs:
            tokens += len(one.token_ids)
            self._of_choice[one.index] += len(one.token_ids)
            if one.finish_reason is not None:
                ended += 1
                tokens -= self._of_choice.pop(one.index)
        self._tokens += tokens
        self._left -= ended
        self._crowding.add(self._asker, tokens, -ended)
        self._crowding.check(self._asker)
