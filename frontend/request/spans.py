"""Trace and log line of one ``generate`` or ``encode`` call: which workers answered, why, how much.

The names are vLLM's where it has the same figure; a test compares them. User content is left out.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from common.errors import MmRouterError
from common.identity import RequestId, WorkerId
from common.observability import tracing
from common.observability.log_lines import current_request
from common.observability.tracing import Kind, Span, Value
from frontend.request_context import current_context
from frontend.router import Decision

logger = logging.getLogger(__name__)

PROMPT_TOKENS: Final = "gen_ai.usage.prompt_tokens"
COMPLETION_TOKENS: Final = "gen_ai.usage.completion_tokens"
FIRST_TOKEN: Final = "gen_ai.latency.time_to_first_token"
WHOLE: Final = "gen_ai.latency.e2e"
MODEL: Final = "gen_ai.response.model"
REQUEST_ID: Final = "gen_ai.request.id"
PARAMETERS: Final[Mapping[str, str]] = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.n": "n",
}
"""Attribute -> sampling parameter."""


def new_request_id() -> RequestId:
    """Return an id that no client can guess. Ids of an HTTP request share its log lines' prefix."""
    base = current_request.get() or secrets.token_hex(16)
    number = next(current_context().engine_calls)
    return RequestId(f"{base}.{number}" if number else base)


class CallSpans:
    """Spans of one call: attributes of the HTTP request's span, and a child for each worker.

    Without a trace only the log line is left, at ``info`` for the first call of a request alone.
    """

    def __init__(self, request_id: RequestId, given: Mapping[str, str] | None) -> None:
        """``given`` are the headers of the client's trace, if the server found some."""
        self._request_id = request_id
        self._given = given
        self._root = tracing.current()
        self._attempt: Span | None = None
        self._workers: list[WorkerId] = []
        context = current_context()
        self._tenant = context.tenant
        self._is_first = "." not in request_id
        self._begun = context.arrived or time.perf_counter()
        self._prompt_tokens = self._media = self._cached_tokens = 0
        self._first_output_s: float | None = None

    def submitted(
        self, model: str, prompt_tokens: int, media: int, params: SamplingParams | PoolingParams
    ) -> None:
        """Record that the prompt is ready to be routed."""
        self._prompt_tokens, self._media = prompt_tokens, media
        if (root := self._root) is None or not root.recording:
            return
        said = {name: getattr(params, field, None) for name, field in PARAMETERS.items()}
        attributes = {name: value for name, value in said.items() if value is not None}
        root.set({MODEL: model, REQUEST_ID: self._request_id, **attributes})
        root.add(PROMPT_TOKENS, prompt_tokens)

    def attempt(self, decision: Decision) -> AbstractContextManager[object]:
        """Start a worker's span; not as the current one, since a stream is left in its middle."""
        self._workers.append(decision.worker_id)
        if self._root is None:
            return nullcontext()
        attributes: dict[str, Value] = {
            "mmrouter.worker_id": decision.worker_id,
            "mmrouter.rank": decision.rank,
            "mmrouter.reason": decision.reason,
            "mmrouter.index": decision.index,
            "mmrouter.predicted_cached_tokens": decision.predicted_cached_tokens,
            "mmrouter.attempt": len(self._workers),
        }
        self._root.set(attributes)
        self._attempt = self._root.child("worker", Kind.CLIENT, attributes)
        return _Ending(self._attempt)

    def headers(self) -> dict[str, str] | None:
        """Return the trace headers for the worker."""
        if self._attempt is not None:
            return self._attempt.headers()
        return tracing.clean(self._given or {}) or None

    def first_output(self, cached_tokens: int) -> None:
        """Record that a worker has begun to answer."""
        if self._first_output_s is None:
            self._first_output_s = time.perf_counter() - self._begun
            self._cached_tokens = cached_tokens
        if self._root is None or self._attempt is None:
            return
        said: dict[str, Value] = {
            FIRST_TOKEN: time.perf_counter() - self._begun,
            "mmrouter.realised_cached_tokens": cached_tokens,
        }
        self._attempt.set(said)
        if len(self._workers) == 1:
            self._root.set(said)

    def moves(self, worker_id: WorkerId, error: MmRouterError, how: str) -> None:
        """Record a move to another worker; ``how`` is ``retry`` before any output."""
        if self._root is not None:
            failed = {"mmrouter.worker_id": worker_id, "error.type": type(error).__name__}
            name = "retry" if how == "retry" else "migration"
            self._root.event(name, {**failed, "mmrouter.how": how})

    def ended(self, outcome: str, completion_tokens: int) -> None:
        """Log the call, and complete its span."""
        whole_s = time.perf_counter() - self._begun
        first = self._first_output_s
        # A client decides how many calls a request makes, so only the first one logs at info.
        logger.log(
            logging.INFO if self._is_first else logging.DEBUG,
            "%s at %s: %d prompt tokens, %d cached, %d media; %d output tokens; %sin all %.3f s%s",
            outcome,
            ", ".join(dict.fromkeys(self._workers)) or "no worker",
            self._prompt_tokens,
            self._cached_tokens,
            self._media,
            completion_tokens,
            "" if first is None else f"first output after {first:.3f} s, ",
            whole_s,
            f"; tenant {self._tenant[:8]}" if self._tenant else "",
        )
        if self._root is None or not self._root.recording:
            return
        self._root.add(COMPLETION_TOKENS, completion_tokens)
        self._root.set(
            {
                WHOLE: whole_s,
                "mmrouter.outcome": outcome,
                "mmrouter.workers": tuple(dict.fromkeys(self._workers)),
            }
        )


class _Ending(AbstractContextManager[object]):
    """End a span on exit."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A stream whose reader has left is closed, which is no failure of the worker's.
        aborted = kind is GeneratorExit
        self._span.end("aborted" if aborted else None if kind is None else kind.__name__)
