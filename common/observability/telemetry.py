"""Prometheus metrics, and :class:`stage`: metric, span, NVTX range and log together."""

import logging
import time
from contextlib import ContextDecorator
from functools import cache
from types import ModuleType, TracebackType
from typing import Final, Self

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from common.errors import ConfigurationError
from common.observability.live_metrics import Asked, Described, QuickHistogram
from common.observability.tracing import Span, current, enter

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds to the first token."""

BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Seconds from one token to the next."""

REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Seconds of a whole request."""

STAGE_S: Final = (
    *(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    *(1.0, 3.0, 10.0, 30.0, 100.0),
)
"""Seconds of a stage; vLLM has no such figure, and some of ours take microseconds."""

logger = logging.getLogger("mmrouter")

STAGE_SECONDS = Histogram(
    "mmrouter_stage_seconds", "Time spent in one stage of a request", ["stage"], buckets=STAGE_S
)
STAGE_FAILURES = Counter(
    "mmrouter_stage_failures", "Stages that ended in an error", ["stage", "error"]
)
REQUESTS = Counter("mmrouter_requests", "Requests by outcome", ["outcome"])
INFLIGHT_REQUESTS = Gauge("mmrouter_inflight_requests", "Requests that this frontend is working on")
REQUEST_BODY_BYTES = Gauge(
    "mmrouter_request_body_bytes", "Bytes of request bodies that arrive or are worked on"
)
CONNECTIONS_CUT = Counter(
    "mmrouter_connections_cut", "Connections of clients that were closed on them", ["reason"]
)
TIME_TO_FIRST_TOKEN = Histogram(
    "mmrouter_time_to_first_token_seconds",
    "From the arrival of a request, with its whole body, to its first token",
    buckets=FIRST_TOKEN_S,
)
INTER_TOKEN_LATENCY = QuickHistogram(
    "mmrouter_inter_token_latency_seconds",
    "From one token to the next, as they come from workers, of requests for one answer",
    buckets=BETWEEN_TOKENS_S,
)
REQUEST_SECONDS = Histogram(
    "mmrouter_request_seconds",
    "From the arrival of a request, with its whole body, to the end of its answer, if it has one",
    buckets=REQUEST_S,
)
EVENT_LOOP_DELAY = Histogram(
    "mmrouter_event_loop_delay_seconds",
    "How late the event loop is, looked at four times a second",
    buckets=STAGE_S,
)
EVENT_LOOP_STALLS = Counter(
    "mmrouter_event_loop_stalls",
    "Times that the event loop stood longer than a second; the log says for which request",
)
THREAD_STALLS = Counter(
    "mmrouter_thread_stalls",
    "Calls that kept a thread longer than a second and a quarter of one for each megapixel; the "
    "log says for which request",
    ["where"],
)
THREADS_REPLACED = Counter(
    "mmrouter_threads_replaced",
    "Threads that did not return within --media-decode-timeout and were replaced",
    ["where"],
)
STUCK_THREADS = Gauge(
    "mmrouter_stuck_threads", "Threads that were replaced and have not returned", ["where"]
)
HF_PROCESSOR_RUNS = Gauge(
    "mmrouter_hf_processor_runs",
    "Calls of the Hugging Face processor since start, warm-up excluded",
    ["side", "worker_id"],
)
PREPROCESS_WAITING = Gauge(
    "mmrouter_preprocess_waiting", "Requests whose media are being processed, or wait for it"
)
PREPROCESSED = Counter(
    "mmrouter_preprocessed_media",
    "Media by whether they were processed, found processed, or shared with another request",
    ["result"],
)
TENSOR_BYTES = Counter(
    "mmrouter_tensor_bytes_sent", "Bytes of processed tensors sent", ["worker_id", "transport"]
)
TENSOR_BYTES_RECEIVED = Counter(
    "mmrouter_tensor_bytes_received",
    "Bytes of media that a worker received, by how they came",
    ["transport"],
)
MEDIA_ITEMS = Counter(
    "mmrouter_media_items",
    "Media items by how the worker got them",
    ["worker_id", "how"],
)
MEDIA_FETCHES = Counter(
    "mmrouter_media_fetches",
    "References to media by source and by what became of them",
    ["source", "outcome"],
)
MEDIA_FETCHED_BYTES = Counter(
    "mmrouter_media_fetched_bytes", "Encoded bytes of media that came over HTTP"
)
MEDIA_DECODES = Counter(
    "mmrouter_media_decodes",
    "Media by whether they were decoded, found decoded, or decoded with another request",
    ["result"],
)
MEDIA_CACHE_BYTES = Gauge(
    "mmrouter_media_cache_bytes", "Encoded and decoded bytes in the media cache"
)
MEDIA_HELD_BYTES = Gauge(
    "mmrouter_media_held_bytes", "Encoded bytes of media held for requests, the cache aside"
)
MEDIA_HELD_PIXELS = Gauge(
    "mmrouter_media_held_pixels",
    "Pixels that are being decoded or are held decoded for requests, the cache aside",
)
ARENA_LEASES = Gauge("mmrouter_arena_leases", "Segments of the arena that are leased out")
ARENA_BYTES = Gauge("mmrouter_arena_bytes", "Bytes of the arena that items may take")
ARENA_BYTES_USED = Gauge("mmrouter_arena_bytes_used", "Bytes of the arena that hold items")
TRANSFER_FALLBACKS = Counter(
    "mmrouter_transfer_fallbacks",
    "Media items that did not travel by the preferred transport",
    ["transport", "reason"],
)
PROMPT_TOKENS = Counter(
    "mmrouter_prompt_tokens", "Tokens of prompts, counted with the first output", ["worker_id"]
)
PREDICTED_CACHED_TOKENS = Counter(
    "mmrouter_predicted_cached_tokens", "Cached tokens that routing expected", ["worker_id"]
)
REALISED_CACHED_TOKENS = Counter(
    "mmrouter_realised_cached_tokens", "Cached tokens that workers reported", ["worker_id"]
)
DECISIONS = Counter("mmrouter_decisions", "Routing decisions", ["worker_id", "reason"])
RETRIES = Counter(
    "mmrouter_retries", "Requests given to another worker before they had any output", ["reason"]
)
MIGRATIONS = Counter(
    "mmrouter_migrations",
    "Requests that went on on another worker after some output, by how",
    ["how"],
)
RETRY_BUDGET_EXHAUSTED = Counter(
    "mmrouter_retry_budget_exhausted",
    "Requests that waited before they were given to another worker, since too many were lately",
)
DEADLINES_EXCEEDED = Counter(
    "mmrouter_deadlines_exceeded", "Requests that waited too long, by what for", ["deadline"]
)
REFUSED_CARDS = Counter("mmrouter_refused_cards", "Cards that did not fit the fleet", ["field"])
UNDECODABLE_MESSAGES = Counter(
    "mmrouter_undecodable_messages", "Messages of the request plane that made no sense", ["side"]
)
REFUSED_CONNECTIONS = Counter(
    "mmrouter_refused_connections",
    "Connections without the fleet's key that were refused, by socket",
    ["socket"],
)
INTERNAL_ERRORS = Counter(
    "mmrouter_internal_errors", "Errors that are mistakes of ours, by place", ["where"]
)
TASK_FAILURES = Counter(
    "mmrouter_task_failures",
    "Restarts of long-lived tasks after an unexpected error, by task",
    ["task"],
)
DISCOVERY_ERRORS = Counter(
    "mmrouter_discovery_errors",
    "What went wrong where cards are kept, by reason",
    ["reason"],
)
WORKERS = Gauge(
    "mmrouter_workers",
    "Workers by state; ejected and busy ones have another one besides; lost ones stay an hour",
    ["state"],
)
MODELS = Asked(
    ("model",),
    Described(
        GaugeMetricFamily,
        "mmrouter_model_serving",
        "1 if a model is served, 0 while it is being loaded",
    ),
    Described(GaugeMetricFamily, "mmrouter_model_workers", "Workers of a model that are connected"),
    Described(GaugeMetricFamily, "mmrouter_model_requests", "HTTP requests that a model works on"),
)
MODEL_LOADS = Counter(
    "mmrouter_model_loads", "Models that this frontend has loaded, by outcome", ["outcome"]
)
RANK_REQUESTS = Asked(
    ("worker_id", "rank", "whose"),
    Described(
        GaugeMetricFamily,
        "mmrouter_rank_requests",
        "Requests that a data-parallel rank has: this frontend's, and others' as it last reported",
    ),
)
RANK_LOAD = Asked(
    ("worker_id", "rank"),
    Described(
        GaugeMetricFamily,
        "mmrouter_rank_running",
        "Requests that the engine of a rank computes, as the worker last reported",
    ),
    Described(
        GaugeMetricFamily,
        "mmrouter_rank_waiting",
        "Requests that wait in the engine of a rank, as the worker last reported",
    ),
    Described(
        GaugeMetricFamily,
        "mmrouter_rank_kv_usage_ratio",
        "Share of a rank's KV blocks in use, as the worker last reported",
    ),
)
KV_EVENTS = Asked(
    ("worker_id", "rank"),
    Described(
        CounterMetricFamily,
        "mmrouter_kv_event_batches",
        "Batches of a rank's KV events that were applied",
    ),
    Described(
        CounterMetricFamily,
        "mmrouter_kv_event_gaps",
        "Times that a rank's KV events had a gap",
    ),
    Described(
        CounterMetricFamily,
        "mmrouter_kv_event_replays",
        "Times that a rank was asked for its KV events again",
    ),
    Described(
        CounterMetricFamily,
        "mmrouter_kv_event_losses",
        "Times that a rank's KV events were lost for good",
    ),
    Described(
        CounterMetricFamily,
        "mmrouter_kv_events_malformed",
        "Messages of a rank's KV events that could not be read",
    ),
    Described(
        GaugeMetricFamily,
        "mmrouter_kv_event_lag_seconds",
        "Age of a rank's last KV event when it was applied, by the clocks of both hosts",
    ),
)
INDEX_RANKS = Gauge(
    "mmrouter_index_ranks", "Ranks of workers by what is known of their blocks", ["knowledge"]
)

PROCESSES = Gauge("mmrouter_processes", "Processes of this frontend that serve")
CHILD_RESTARTS = Counter(
    "mmrouter_child_restarts",
    "Processes that this one had started, which ended and were replaced, by what they do",
    ["role"],
)
EJECTIONS = Counter(
    "mmrouter_ejections",
    "Times a worker was taken out after errors or stalls",
    ["worker_id", "reason"],
)
SPANS = Counter(
    "mmrouter_spans", "Spans of requests by whether the collector has taken them", ["outcome"]
)
WORKER_PAGES_MISSING = Counter(
    "mmrouter_worker_pages_missing",
    "Workers whose own metrics were asked for and are not shown, by reason",
    ["reason"],
)

_OF_ONE_WORKER: Final = (
    HF_PROCESSOR_RUNS,
    TENSOR_BYTES,
    MEDIA_ITEMS,
    PROMPT_TOKENS,
    PREDICTED_CACHED_TOKENS,
    REALISED_CACHED_TOKENS,
    DECISIONS,
    EJECTIONS,
)


def forget_worker(worker_id: str) -> None:
    for metric in _OF_ONE_WORKER:
        metric.remove_by_labels({"worker_id": worker_id})


_nvtx: ModuleType | None = None  # once ranges are emitted

NVTX_DOMAIN: Final = "mmrouter"


def enable_nvtx() -> None:
    """Emit an NVTX range per stage from now on. Raises ConfigurationError: package missing."""
    global _nvtx
    try:
        import nvtx
    except ImportError as error:
        raise ConfigurationError(f"--nvtx needs a package ({error}): pip install nvtx") from error
    _nvtx = nvtx


@cache
def _seconds(stage_name: str) -> Histogram:
    # A label lookup takes a lock and longer than the observation.
    return STAGE_SECONDS.labels(stage_name)


class stage(ContextDecorator):
    """Time a stage: observe ``mmrouter_stage_seconds``, make a span and an NVTX range (if enabled)
    and a debug line. For ``with`` or a function. An error is counted and re-raised. NVTX ranges of
    concurrent requests may overlap."""

    def __init__(self, name: str) -> None:
        """``name`` is the ``stage`` label, a short constant. Never put a request id in it."""
        self._name = name

    def _recreate_cm(self) -> Self:
        return type(self)(self._name)

    def __enter__(self) -> Span | None:
        """Begin; return the span, None if the request is not traced."""
        self._range = _nvtx.start_range(self._name, domain=NVTX_DOMAIN) if _nvtx else None
        self._parent = parent = current()
        self._span: Span | None = None
        if parent is not None and parent.recording:
            self._span = parent.child(self._name)
            enter(self._span)
        self._started = time.perf_counter()
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        elapsed = time.perf_counter() - self._started
        name = self._name
        if kind is not None:
            STAGE_FAILURES.labels(name, kind.__name__).inc()
        _seconds(name).observe(elapsed)
        logger.debug("%s took %.3f ms", name, elapsed * 1e3)
        if self._span is not None:
            enter(self._parent)
            self._span.end(None if kind is None else kind.__name__)
        if self._range is not None and _nvtx is not None:
            _nvtx.end_range(self._range)
