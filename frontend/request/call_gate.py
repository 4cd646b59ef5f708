"""Limit the engine calls of requests that make many, and the choices of one call.

vLLM's server makes a call for each prompt of a request, all at once, and an engine runs each choice
as a request of its own. A thousand of either filled the slots of an engine, and another chat waited
for 19 seconds. So they wait here, and leave some slots to others.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from common.errors import OverloadedError, RequestRejectedError
from frontend.client_turns import CHOICES_LIKE_CHATS
from frontend.request.deadlines import Deadlines
from frontend.request_context import current_context
from frontend.router import Slots

CALLS_AT_ONCE: Final = 16
"""Calls that start before the event loop gets a turn. Each takes a millisecond of it. A thousand at
once, as 20 beam searches make at each token, delayed other requests by over a second."""

BULK_SHARE: Final = 7 / 8
"""Fraction of a model's slots that bulk calls may take beside other requests."""

BULK_TOKENS: Final = 3 / 4
"""Fraction of the prompt tokens with which workers are busy that bulk calls may have in flight."""

MAX_CHOICES: Final = 1 / 2
"""Fraction of an engine's slots that the choices of one prompt may take."""

FEW_CHOICES: Final = 16
"""Choices that any engine is asked for, however few its slots are."""

FEW_BIASES: Final = 1 << 10
"""Tokens of one call with a bias, or barred by ``min_tokens``, that are not counted."""

MAX_BIASES: Final = 1 << 18
"""These tokens of all calls of several requests. Whenever a choice joins or leaves, an engine makes
tensors of all of them in Python: those of 64 requests, in 76 MB, kept others waiting for 21 s."""


class Size(NamedTuple):
    """Share of an engine that a call occupies."""

    choices: int
    tokens: int


Waiting: TypeAlias = tuple[Size, asyncio.Future[None]]


@dataclass(eq=False)
class Batch:
    """The engine calls of one request.

    Attributes:
        running: choices of its calls that have begun and were not read to their ends.
        waiting: its calls that wait, and what wakes them, oldest first.
        keep: called with the bytes of each pooled answer, which is held until the request's last
            one; raises OverloadedError if there is no room.
        logprobs: log probabilities that its calls asked for.
        repeated: tokens of prompts that its calls repeat for several choices.
        biases: tokens with a bias of its calls under way.
        accepted: whether a worker got one of its calls: then none is refused for busy workers.
    """

    client: str
    running: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)
    keep: Callable[[int], None] = lambda nbytes: None
    logprobs: int = 0
    repeated: int = 0
    biases: int = 0
    accepted: bool = False


def batch_of_request() -> Batch:
    """Return the batch of this task's request; a new one if there is no request."""
    context = current_context()
    batch = context.find(Batch)
    if batch is None:
        batch = Batch(context.client)
        context.put(batch)
    return batch


class CallGate:
    """Starts the calls of one model.

    A request's only call of a few choices starts at once. Bulk calls, which are all others, start
    while a worker is not busy, and :data:`BULK_SHARE` of the slots and :data:`BULK_TOKENS` have
    room, or if no other one runs; first those of the client, then of the request, of which least
    runs.
    """

    def __init__(self, slots: Callable[[], Slots], most: int) -> None:
        """``most`` choices run at once, in engines of any number of slots."""
        self._slots = slots
        self._most = most
        self._running = 0
        self._bulk = 0
        self._tokens = 0
        self._biases = 0
        self._of_client: Counter[str] = Counter()
        self._waiting: dict[Batch, None] = {}
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)

    @asynccontextmanager
    async def call(
        self, deadlines: Deadlines, tokens: int, choices: int = 1, biases: int = 0
    ) -> AsyncIterator[Callable[[], None]]:
        """Run a call of this task's request, once there is room. ``tokens`` weigh its prompt,
        ``biases`` what samplers read of it.

        Give a function to call once an engine has computed the answer: a client that does not read
        it keeps only its own calls from starting.

        Raises:
            RequestRejectedError: these are too many choices for one engine.
            DeadlineExceededError: there was no room in time.
            OverloadedError: other requests have too many biases.
        """
        self._check(choices)
        size, batch = Size(choices, tokens), batch_of_request()
        bulk = choices > CHOICES_LIKE_CHATS or batch.running > 0 or bool(batch.waiting)
        with ExitStack() as room:
            self._take_biases(batch, biases, room)
            if bulk:
                await self._wait(batch, size, deadlines)
            else:
                self._started(batch, size, bulk)
            room.callback(self._computed, batch, size, bulk)
            try:
                async with self._turns:
                    await asyncio.sleep(0)
                yield room.close
            finally:
                room.close()
                self._read(batch, size)

    def _take_biases(self, batch: Batch, biases: int, room: ExitStack) -> None:
        if biases <= FEW_BIASES:
            return
        others = self._biases - batch.biases
        if others and self._biases + biases > MAX_BIASES:
            raise OverloadedError(
                f"the requests under way have more than {MAX_BIASES} entries of `logit_bias`, a "
                "quarter of those of `allowed_token_ids`, and those of `stop_token_ids` with "
                "`min_tokens`: try again later, or send fewer"
            )
        self._add_biases(batch, biases)
        room.callback(self._add_biases, batch, -biases)

    def _add_biases(self, batch: Batch, biases: int) -> None:
        batch.biases += biases
        self._biases += biases

    def _check(self, choices: int) -> None:
        if choices <= FEW_CHOICES:
            return
        slots = self._slots().largest
        most = max(FEW_CHOICES, int(MAX_CHOICES * slots))
        if choices > most and slots:  # without workers the call gets 503
            raise RequestRejectedError(
                f"`n` asks for {choices} choices of one prompt, more than the {most} that one "
                "worker of this model runs at once for a request: send several requests"
            )

    async def _wait(self, batch: Batch, size: Size, deadlines: Deadlines) -> None:
        call = size, asyncio.get_running_loop().create_future()
        batch.waiting.append(call)
        self._waiting[batch] = None
        self._start()
        started = False
        try:
            async with asyncio.timeout(deadlines.left_s()):
                await call[1]
            started = True
        except TimeoutError as error:
            raise deadlines.late() from error
        finally:
            if not started:
                self._withdraw(batch, call)

    def _withdraw(self, batch: Batch, call: Waiting) -> None:
        if call in batch.waiting:
            batch.waiting.remove(call)
            if not batch.waiting:
                del self._waiting[batch]
            self._start()  # a smaller one may fit
        else:
            self._computed(batch, call[0], bulk=True)
            self._read(batch, call[0])

    def _start(self) -> None:
        """Start the bulk calls that there is room for."""
        if not self._waiting:
            return
        slots = self._slots()
        most = min(self._most, int(BULK_SHARE * slots.total) - slots.others)
        room = most - self._running
        tokens = int(BULK_TOKENS * slots.tokens) - self._tokens
        while ready := [batch for batch in self._waiting if _has_room(batch, most)]:
            batch = min(ready, key=self._usage)
            size, started = batch.waiting[0]
            if self._bulk and (slots.busy or size.choices > room or size.tokens > tokens):
                return
            batch.waiting.popleft()
            if not batch.waiting:
                del self._waiting[batch]
            room -= size.choices
            tokens -= size.tokens
            self._started(batch, size, bulk=True)
            if not started.done():  # else its task was cancelled, and will count it as ended
                started.set_result(None)

    def _usage(self, batch: Batch) -> tuple[int, int]:
        return self._of_client[batch.client], batch.running

    def _started(self, batch: Batch, size: Size, bulk: bool) -> None:
        batch.running += size.choices
        self._of_client[batch.client] += size.choices
        self._running += size.choices
        if bulk:
            self._bulk += 1
            self._tokens += size.tokens

    def _read(self, batch: Batch, size: Size) -> None:
        batch.running -= size.choices
        if batch.waiting:  # what was read makes room for this request alone
            self._start()

    def _computed(self, batch: Batch, size: Size, bulk: bool) -> None:
        self._running -= size.choices
        if bulk:
            self._bulk -= 1
            self._tokens -= size.tokens
        self._of_client[batch.client] -= size.choices
        if not self._of_client[batch.client]:
            del self._of_client[batch.client]
        self._start()


def _has_room(batch: Batch, most: int) -> bool:
    """Return whether a request has read enough to begin its next call."""
    return not batch.running or batch.running + batch.waiting[0][0].choices <= most
