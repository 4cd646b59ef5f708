"""Messages of the request plane. No I/O, no sockets, no engine.

A frontend opens a session with :class:`Hello`; the worker answers :class:`Welcome`, or
:class:`Goodbye` with a reason. Then, per request:

 frontend                         worker
 Submit ────────────────────────▶
   ◀──────────────────────── Nack     media it lacks   (any number of times)
 Supply ────────────────────────▶
   ◀──────────────────────── Ack      engine has the media, leases may end
   ◀──────────────────────── Outputs  until one of its own says finished
   ◀──────────────────────── Failed   instead, at any point; it is the last
 Abort  ────────────────────────▶           answered by Ack (if still owed) and Failed

and, about the worker itself:

 AskFigures ────────────────────▶
   ◀──────────────────────── Figures  unless it is still answering another one
 Operate ───────────────────────▶
   ◀──────────────────────── Operated when it is done, or at once why it is not

One :class:`Outputs` has the outputs of several requests in one engine step. Every request ends with
exactly one finished :class:`Output` or one :class:`Failed`, and before it one :class:`Ack`, so that
a frontend knows when its leased memory is free again. :class:`Ping` and :class:`Status` are
heartbeats; silence longer than :data:`SESSION_TIMEOUT_S` ends the session on either side. A
frontend that refuses a worker sends :class:`Refused`, for the worker's log alone.

No message is skipped, since an answer would be missing or have a gap. An undecodable
:class:`Submit`, or one with the id of a running request, is answered by :class:`Failed` alone; an
undecodable answer ends its request. Any other undecodable message ends the session. A peer without
a session is told only that.

:mod:`common.request_plane.lifecycle` has the states and transitions of a request. Messages contain
vLLM's own types, so sampling parameters and log probabilities need no translation. Tensors of
inline media are further frames of the same message.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import torch
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import RequestStateStats

from common.errors import ProtocolError
from common.identity import BlockHash, Incarnation, MmHash, RequestId, WorkerId
from common.observability.tracing import TraceHeaders
from common.request_plane.card import MAX_ADAPTERS, MAX_NAME_LEN
from common.request_plane.operations import MAX_MESSAGE_LEN, Condition, Operation, Outcome
from common.request_plane.step_sums import Count, RankStatus, StepSums


class HeldAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that a worker has; fields are those of a card's ``Adapter``."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LEN)]
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    base_model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LEN)] | None = (
        None
    )
    is_3d_lora_weight: bool = False

    @property
    def legible(self) -> bool:
        """Whether all text is printable, as log lines need."""
        return all(map(str.isprintable, (self.name, self.path, self.base_model_name or "")))


PROTOCOL_VERSION = 12

PING_INTERVAL_S = 1.0  # heartbeat interval of each side
SESSION_TIMEOUT_S = 15.0  # silence after which the peer counts as dead
SLOWEST_LINE: Final = 1 << 20  # bytes a second, by which the silence of a large message is excused
SHUTTING_DOWN = "the worker is shutting down"  # of Goodbye

Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
"""Seconds since the epoch; neither infinite nor no number."""

MAX_SUBMIT_BYTES = 64 << 20
"""Of a message to a worker beside its tensors: a prompt of ten million tokens takes 50 MB."""

MAX_MEDIA = 1 << 13
"""Media of one request; frontends take 256 unless told otherwise."""

MAX_NEW_BLOCKS = 256
"""Blocks of one prompt that are told ahead of KV events; a prefix is what the others need."""

MAX_NEW_MEDIA = 64  # reported media items of one prompt
MAX_MM_HASH_LEN = 256  # characters of one of them: twice vLLM's longest hash
MAX_RANKS = 4096  # ranks with steps in one :class:`Status`; more than any card names
MAX_COMING = 64  # prompts reported in one :class:`Status`

Shipments: TypeAlias = Annotated[list[bytes], msgspec.Meta(max_length=MAX_MEDIA)]
"""Transfer metadata of media."""

NewBlocks: TypeAlias = Annotated[
    list[Annotated[BlockHash, msgspec.Meta(min_length=1, max_length=64)]],
    msgspec.Meta(max_length=MAX_NEW_BLOCKS),
]
"""Hashes of the blocks of a prompt that its rank does not hold yet, the first ones."""

NewMedia: TypeAlias = Annotated[
    list[Annotated[MmHash, msgspec.Meta(max_length=MAX_MM_HASH_LEN)]],
    msgspec.Meta(max_length=MAX_NEW_MEDIA),
]
"""Media items of a prompt, the first ones."""

MAX_OUTPUTS = 128
"""Outputs of one message: what a frontend decodes and hands out before others get their turn."""

MAX_POOLED_BYTES = 256 << 20
"""Of one pooled answer. Vectors of 4,096 numbers for each of 16,000 tokens have as many."""

MAX_OPERATIONS = 8
"""Of one frontend that are not answered yet. A worker does one at a time, and refuses others."""

MAX_FIGURES_BYTES = 4 << 20  # of a worker's metrics page; one vLLM engine's has some 100 kB


class FailureKind(StrEnum):
    """Reason of a worker's failure, as far as the frontend must act on it."""

    INVALID = "invalid"  # the engine refused it: the user's mistake
    BUSY = "busy"  # the engine's admission control refused it: another may not
    MEDIA = "media"  # its media could not be had
    ENGINE = "engine"  # the engine failed on it
    ENGINE_DEAD = "engine_dead"  # the engine is gone: no request can succeed here
    ABORTED = "aborted"  # the frontend asked for it
    LATE = "late"  # its time was over
    PROTOCOL = "protocol"  # the worker could not read it, or has one of that id already


class MediaPart(msgspec.Struct, frozen=True, array_like=True):
    """One media item's place in the prompt.

    Attributes:
        modality: vLLM's name, for example ``image``.
        offset: first prompt token of its placeholder.
        length: tokens of its placeholder.
        is_embed: one byte (0 or 1) per placeholder token, or None for all ones.
    """

    modality: str
    mm_hash: MmHash
    offset: int
    length: int
    is_embed: bytes | None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Open a session, with a transfer offer as ``common.transfer`` encodes it."""

    version: int
    frontend_id: Incarnation
    offer: bytes


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Replace the transfer offer of :class:`Hello`; answered with :class:`Terms`."""

    offer: bytes


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One ``generate`` or ``encode`` call: exactly one of ``sampling_params`` and
    ``pooling_params`` is set.

    Attributes:
        media: every media item of the prompt, by position.
        shipments: transfer metadata of the items that come along, each once.
        prompt_token_ids: None if the whole prompt is given as embeddings.
        prompt_embeds: (tokens, hidden).
        prompt_is_token_ids: which positions are tokens, in a prompt with some embeddings.
        rank: by the card's numbers; None for any.
        trace_headers: of the frontend's span, or of the client's if it has none.
        timeout_s: seconds until the deadline; None for none.
        prefill_tokens: load until its first output, as the frontend estimates it: uncached tokens,
            and media tokens to encode.
        new_blocks: reported to other frontends.
    """

    request_id: RequestId
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    media: Annotated[list[MediaPart], msgspec.Meta(max_length=MAX_MEDIA)]
    shipments: Shipments
    prompt_text: str | None = None
    prompt_embeds: torch.Tensor | None = None
    prompt_is_token_ids: list[bool] | None = None
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    priority: int = 0
    rank: int | None = None
    trace_headers: TraceHeaders | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None  # opaque to us: vLLM's own
    timeout_s: float | None = None
    prefill_tokens: Count = 0
    new_blocks: NewBlocks = []
    pooling_params: PoolingParams | None = None

    def __post_init__(self) -> None:
        if (self.sampling_params is None) == (self.pooling_params is None):
            raise ValueError("a request has either sampling_params or pooling_params")

    @property
    def prompt_tokens(self) -> int:
        if self.prompt_token_ids is None and self.prompt_embeds is not None:
            return len(self.prompt_embeds)
        return len(self.prompt_token_ids or ())

    @property
    def choices(self) -> int:
        """Answers, each a request of its own in the engine."""
        return 1 if self.sampling_params is None else self.sampling_params.n


class Supply(msgspec.Struct, frozen=True, tag="supply"):
    """Media that a :class:`Nack` asked for."""

    request_id: RequestId
    shipments: Shipments


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort a request. Unknown ids are ignored: it may have ended meanwhile."""

    request_id: RequestId


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat of the frontend. ``coming`` are the bytes of a large message that follows: while it
    travels no other heartbeat can arrive."""

    coming: Count = 0


class AskFigures(msgspec.Struct, frozen=True, tag="ask_figures"):
    """Ask for the worker's own metrics; the answer has the same number."""

    number: Count


class Operate(msgspec.Struct, frozen=True, tag="operate"):
    """Run an operation on the engine, one at a time over all frontends. It continues if the session
    ends. The answer has the same number."""

    number: Count
    operation: Operation


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """End the session; the worker aborts its remaining requests."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Tell the worker why a frontend refuses this run of it. Sent repeatedly, without a session;
    never answered, so older workers may ignore it."""

    frontend: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LEN)]
    incarnation: Incarnation
    reason: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_LEN)]


ToWorker: TypeAlias = (
    Hello | Offer | Submit | Supply | Abort | Ping | AskFigures | Operate | Leave | Refused
)


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Open the session; ``reply`` answers the transfer offer, as ``common.transfer`` encodes it."""

    version: int
    worker_id: WorkerId
    incarnation: Incarnation
    reply: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class Terms(msgspec.Struct, frozen=True, tag="terms"):
    """The worker's answer to an :class:`Offer`, as in :class:`Welcome`."""

    reply: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Refuse or end the session, with a reason."""

    reason: str


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The engine has taken a request's media, and keeps the ``held`` ones."""

    request_id: RequestId
    held: list[MmHash]


class Nack(msgspec.Struct, frozen=True, tag="nack"):
    """Ask for media that the worker lacks, with a reason (``not_held`` or the transfer error's
    name). The request waits for a Supply."""

    request_id: RequestId
    missing: list[MmHash]
    reason: str


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One ``RequestOutput`` or ``PoolingRequestOutput`` of the engine, without what the frontend
    knows.

    Attributes:
        outputs: empty for a pooled answer.
        pooled: any shape, at most :data:`MAX_POOLED_BYTES`; None for a generated answer.
        metrics: only of the finished output, as no other is read.
    """

    request_id: RequestId
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
    metrics: RequestStateStats | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None  # opaque to us: the connector's
    pooled: torch.Tensor | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs of several requests, in the engine's order."""

    outputs: Annotated[list[Output], msgspec.Meta(max_length=MAX_OUTPUTS)]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request ended without an answer."""

    request_id: RequestId
    kind: FailureKind
    message: str


class Coming(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that another frontend sent to a rank, ahead of the KV events."""

    rank: Count
    new_blocks: NewBlocks
    media: NewMedia


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Heartbeat and load of the worker. Sent every second, soon after the load of other frontends
    has changed, and with the end of a request.

    Attributes:
        ranks: each rank of the card once.
        hf_processor_runs: calls of the HF processor since start.
        coming: prompts of other frontends since the last status, oldest first. In a burst the
            oldest are left out: KV events report them.
        condition: whether requests are taken.
        blocks_emptied: time at which an operator had KV blocks cleared, in seconds since the epoch
            by the worker's clock; 0 for never. KV events report it only with the engine's next
            step.
        media_emptied: number of times that an operator had media cleared.
        stands_still: requests here get no output until an operator resumes them.
        steps: sums over the steps of each rank, every two seconds; otherwise empty.
        adapters: all adapters, if changed since the last report or different from the card.
        active_adapters: the adapters that the engine used last, as many as it has slots, if
            changed.
        arriving: bytes of a large message that follows, as :class:`Ping` tells them.
    """

    ranks: list[RankStatus]
    hf_processor_runs: Count
    coming: Annotated[list[Coming], msgspec.Meta(max_length=MAX_COMING)] = []
    condition: Condition = Condition.SERVING
    blocks_emptied: Moment = 0.0
    media_emptied: Count = 0
    stands_still: bool = False
    steps: Annotated[list[StepSums], msgspec.Meta(max_length=MAX_RANKS)] = []
    adapters: Annotated[list[HeldAdapter], msgspec.Meta(max_length=MAX_ADAPTERS)] | None = None
    active_adapters: (
        Annotated[
            list[Annotated[str, msgspec.Meta(max_length=MAX_NAME_LEN)]],
            msgspec.Meta(max_length=MAX_ADAPTERS),
        ]
        | None
    ) = None
    arriving: Count = 0

    def check(self, ranks: Collection[int]) -> None:
        """Check that the status is about exactly these ranks. Raises ProtocolError: names both."""
        told = sorted(one.rank for one in self.ranks)
        if told != sorted(ranks):
            raise ProtocolError(f"a status is of ranks {told}, the card of {sorted(ranks)}")
        of = [*(each.rank for each in self.coming), *(each.rank for each in self.steps)]
        for rank in of:
            if rank not in ranks:
                raise ProtocolError(f"a status tells of rank {rank}, which is not on the card")
        if not all(each.legible for each in self.adapters or ()):
            raise ProtocolError("a status names an adapter with characters that can't be printed")


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """The worker's metrics, vLLM's and ours, as Prometheus text; empty if too large."""

    number: Count
    page: Annotated[bytes, msgspec.Meta(max_length=MAX_FIGURES_BYTES)]


class Operated(msgspec.Struct, frozen=True, tag="operated"):
    """Outcome of an :class:`Operate`, with the reason if it was not done."""

    number: Count
    outcome: Outcome
    message: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_LEN)] = ""


ToFrontend: TypeAlias = (
    Welcome | Terms | Goodbye | Ack | Nack | Outputs | Failed | Status | Figures | Operated
)

_NAMES: Final = ("kv_transfer_params", "ec_transfer_params")
"""Engines trust these: a connector contacts the hosts that they name, and without one they set the
cached token count. So no client may set them."""


def drop_transfer_params(params: object) -> None:
    """Drop client-supplied transfer parameters, in place; pooling parameters have none."""
    if isinstance(params, SamplingParams) and params.extra_args:
        kept = {name: value for name, value in params.extra_args.items() if name not in _NAMES}
        params.extra_args = kept or None


def names_encoder(params: object) -> bool:
    extra = params.extra_args if isinstance(params, SamplingParams) else None
    return bool(extra and extra.get("ec_transfer_params"))
