"""End requests whose structure makes an engine too slow.

Between two steps an engine has xgrammar make a mask for the next token of each answer with a
structure, and no other request goes on meanwhile. An ambiguous grammar of 60 bytes takes longer
with each token, without end; 64 choices of a structure that takes 0.04 s for each take 2.5 s in
every step. A frontend's trial covers the first tokens of one answer only.

A single mask may take minutes: ``[0-9]{80}((( +)+)+x[a-z ]+)+`` passes the trial, and 128 spaces
and an "x" later xgrammar reads each token of the vocabulary in thousands of ways. Nothing stops it,
so a thread does the work, and is left behind.
"""

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import ClassVar, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from vllm.config import StructuredOutputsConfig, VllmConfig, config
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

import backend_worker.engine.vllm_faults  # noqa: F401  # in the engine's process, too

logger = logging.getLogger(__name__)

SLOW_S: Final = 0.2
"""CPU seconds of a mask, or of a token, that count: twice what a trial lets pass, since the cores
of a worker may be slower."""

MAX_SLOW_S: Final = 0.5
"""Sum of these from which a request ends with an error."""

MAX_STEP_S: Final = 0.5
"""CPU seconds for all masks of one request in one step, from which it ends as well."""

DEADLINE_S: Final = 0.25
"""CPU seconds that an engine waits for a mask or a token."""

POLL_INTERVAL_S: Final = 0.05
IDLE_PRIORITY: Final = 19  # niceness of a thread that is left behind

EARLY: Final = 64
"""Masks of an answer that a frontend's trial has seen the like of."""

_CHOICES: Final = re.compile(r'root ::= "(?:[^"\\]|\\.)*+"(?: \| "(?:[^"\\]|\\.)*+")*+')

LATER_SLOW_S: Final = 0.06
"""As :data:`SLOW_S`, for later masks that take twice as long as the early ones."""


class _Done(NamedTuple):
    """Some work that ended, with the error that it raised, if any."""

    result: object
    took: float
    error: Exception | None = None


class _Thread:
    """A thread that works for an engine's, which waits."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="structure", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            began, result, error = time.thread_time(), None, None
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001  # for the thread that waits
                error = raised
            self._done.put(_Done(result, time.thread_time() - began, error))

    def do(self, work: Callable[[], object]) -> _Done | None:
        """Return None if the work goes on beyond the deadline. The thread ends after it then."""
        assert self._thread.ident is not None and self._thread.native_id is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        began = time.clock_gettime(clock)
        self._work.put(work)
        while True:
            try:
                return self._done.get(timeout=POLL_INTERVAL_S)
            except Empty:
                if time.clock_gettime(clock) - began > DEADLINE_S:
                    self._work.put(None)
                    os.setpriority(os.PRIO_PROCESS, self._thread.native_id, IDLE_PRIORITY)
                    return None


@dataclass(eq=False)
class _Spent:
    """CPU seconds for the answers of one request, ``step_s`` in the last step."""

    step: int = 0
    step_s: float = 0.0
    slow_s: float = 0.0

    def count(self, took: float, step: int, slow_s: float) -> None:
        if step != self.step:
            self.step, self.step_s = step, 0.0
        self.step_s += took
        if took > slow_s:
            self.slow_s += took
        if self.step_s > MAX_STEP_S:
            self.slow_s += self.step_s

    @property
    def too_much(self) -> bool:
        return self.slow_s > MAX_SLOW_S


class _Engine:
    """The requests of this process, by the names that frontends gave them, and its steps."""

    def __init__(self) -> None:
        self._requests: WeakValueDictionary[str, _Spent] = WeakValueDictionary()
        self._filling = False
        self._step = 0

    def of(self, request_id: str) -> _Spent:
        """Return the request of an answer, ``choice_request.prompt-attempt-suffix``."""
        name = re.split(r"[.-]", re.sub(r"\A[0-9]+_", "", request_id), maxsplit=1)[0]
        return self._requests.setdefault(name, _Spent())

    def fills(self) -> int:
        """Return the number of the step. One begins with the first mask after a token."""
        if not self._filling:
            self._filling = True
            self._step += 1
        return self._step

    def accepts(self) -> int:
        self._filling = False
        return self._step


_ENGINE: Final = _Engine()


class WatchedGrammar(backend_xgrammar.XgrammarGrammar):
    """xgrammar's state of one answer, which takes no token if its request has been too slow."""

    plain = False
    """Whether it is of choices, or JSON without patterns: never ambiguous, so it needs no thread,
    which takes 35 µs more for a token where 50 are usual.
    """

    _spent: _Spent | None = None
    _masks = 0
    _early_s = 0.0
    _lost = False  # to a thread that may still change the matcher
    _threads: ClassVar[list[_Thread]] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the answer may go on."""
        spent = self._spent = self._spent or _ENGINE.of(request_id)
        step = _ENGINE.accepts()
        if spent.too_much:
            return False
        accept = super().accept_tokens
        accepted, took, _ = self._do(lambda: accept(request_id, tokens), spent)
        spent.count(took, step, SLOW_S)
        return bool(accepted) and not spent.too_much

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Make the mask."""
        step, spent = _ENGINE.fills(), self._spent
        if spent is None:  # the first mask was made by the trial too
            super().fill_bitmask(bitmask, idx)
            return
        row = bitmask[idx : idx + 1]
        # Of its own, since a thread that is left behind goes on to write it.
        mask = row if self.plain else torch.empty_like(row)
        fill = super().fill_bitmask
        took = 0.0 if spent.too_much else self._do(lambda: fill(mask, 0), spent).took
        if spent.too_much:
            row.fill_(-1)  # any token: the answer ends with it
            return
        row.copy_(mask)
        self._masks += 1
        if self._masks < EARLY:
            self._early_s = max(self._early_s, took)
        later = not self.plain and self._masks >= EARLY
        spent.count(took, step, max(LATER_SLOW_S, 2 * self._early_s) if later else SLOW_S)

    def rollback(self, num_tokens: int) -> None:
        """Go back, unless the answer is lost."""
        if not self._lost:
            super().rollback(num_tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return those that may follow, none if the answer is lost."""
        return [] if self._lost else super().validate_tokens(tokens)

    def _do(self, work: Callable[[], object], spent: _Spent) -> _Done:
        """Do some work for at most the deadline, beyond which the request is too slow."""
        if self.plain:
            began = time.thread_time()
            return _Done(work(), time.thread_time() - began)
        try:
            thread = self._threads.pop()
        except IndexError:
            thread = _Thread()
        if (done := thread.do(work)) is not None:
            self._threads.append(thread)
            if done.error is not None:
                raise done.error
            return done
        self._lost = True
        spent.slow_s = math.inf
        logger.warning(
            "xgrammar took more than %s s for one token of an answer; its request ends", DEADLINE_S
        )
        return _Done(None, DEADLINE_S)


_compile: Final = backend_xgrammar.XgrammarBackend.compile_grammar


def compile_grammar(
    self: backend_xgrammar.XgrammarBackend,
    request_type: StructuredOutputOptions,
    grammar_spec: str,
    *rest: set[int] | None,
    **options: set[int] | None,
) -> backend_xgrammar.XgrammarGrammar:
    """See vLLM's."""
    made = _compile(self, request_type, grammar_spec, *rest, **options)
    if request_type == StructuredOutputOptions.GRAMMAR:
        made.plain = _CHOICES.fullmatch(grammar_spec) is not None
    else:
        json = request_type in (StructuredOutputOptions.JSON, StructuredOutputOptions.JSON_OBJECT)
        # Its keys may be escaped.
        made.plain = json and "pattern" not in grammar_spec and "\\u" not in grammar_spec
    return made


@config
class WatchedStructuresConfig(StructuredOutputsConfig):
    """vLLM's settings. An engine process that unpickles them imports this module."""


def watch_structures(engine: VllmConfig) -> None:
    """Have the engines of a configuration watch the structures of answers."""
    engine.structured_outputs_config = WatchedStructuresConfig(
        **vars(engine.structured_outputs_config)
    )


vars(backend_xgrammar)["XgrammarGrammar"] = WatchedGrammar
backend_xgrammar.XgrammarBackend.compile_grammar = compile_grammar
