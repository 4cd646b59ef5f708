"""The card: a worker's properties, and the check that a fleet agrees.

The frontend takes model and settings from its first card. It refuses every later one that would
change tokens, media hashes or block hashes.
"""

from enum import StrEnum
from typing import Annotated, Final, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    TypeAdapter,
    model_validator,
)

from common.bounded_json import JsonLimits, MalformedJsonError
from common.errors import CardError, CardIncompatibleError
from common.identity import Incarnation, WorkerId

CARD_VERSION = 8

MAX_RANKS = 1024

MAX_ADAPTERS = 1024

CARD_LIMITS: Final = JsonLimits(most_bytes=1 << 20, most_commas=1 << 14)
"""A card with the most ranks, event sources and adapters has 10,000 members."""

Rank: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 16)]  # vLLM names engines by two bytes

MAX_NAME_LEN = 128

MAX_TEXT_LEN: Final = 1 << 14
"""Characters of any other text on a card. All of them stand in sentences and logs."""

Amount: TypeAlias = Annotated[int, Field(ge=0, le=1 << 40)]
"""Of blocks, tokens or requests: no more than any machine has."""

Positive: TypeAlias = Annotated[int, Field(gt=0, le=1 << 40)]

_Member = TypeVar("_Member")

_Listed: TypeAlias = Annotated[list[_Member], FailFast()]
"""Its first wrong member is the only one for which an error is made."""


def _name(name: str) -> str:
    """Validate a name, which is quoted before its author is authenticated."""
    if not 0 < len(name) <= MAX_NAME_LEN or not name.isprintable():
        raise ValueError(f"it is not a name of up to {MAX_NAME_LEN} printable characters")
    return name


def _on_one_line(path: str) -> str:
    if not path.isprintable():
        raise ValueError("it has characters that can't be printed")
    return path


def _shown(text: str) -> str:
    """Shorten untrusted text to one line, for logs and users."""
    short = text[:MAX_NAME_LEN]
    return text if short == text and text.isprintable() else repr(short)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_max_length=MAX_TEXT_LEN)


class _Version(BaseModel):
    """Fields of cards of all versions."""

    card_version: int | None = None
    worker_id: str = ""


class ModelSettings(_Frozen):
    """Engine arguments that decide tokens and media hashes. Every field has the name and meaning of
    a vLLM engine argument, so that a frontend can set it on vLLM's own namespace. Values are
    resolved by vLLM: equivalent workers have equal ones."""

    model: str
    runner: str
    convert: str
    model_impl: str
    model_class_overrides: dict[str, str]
    hf_config_path: str | None
    tokenizer: str | None
    tokenizer_mode: str
    revision: str | None
    tokenizer_revision: str | None
    code_revision: str | None
    trust_remote_code: bool
    dtype: str
    max_model_len: Positive
    skip_tokenizer_init: bool
    hf_overrides: dict[str, JsonValue]
    config_format: str
    generation_config: str
    override_generation_config: dict[str, JsonValue]
    max_logprobs: int = Field(ge=-1, le=1 << 40)
    logprobs_mode: str
    return_sampling_mask: bool
    enable_trace_replay: bool
    language_model_only: bool
    limit_mm_per_prompt: dict[str, JsonValue]
    mm_processor_kwargs: dict[str, JsonValue] | None
    media_io_kwargs: dict[str, JsonValue]
    mm_hasher_algorithm: str
    mm_device_do_normalize: bool
    video_pruning_rate: float | None
    video_pruning_method: str
    interleave_mm_strings: bool
    enable_mm_embeds: bool
    enable_prompt_embeds: bool
    pooler_config: dict[str, JsonValue] | None


class OutputSettings(_Frozen):
    """Fields of vLLM's ``structured_outputs_config`` and ``reasoning_config``."""

    backend: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    enable_in_reasoning: bool
    reasoning_parser: str
    reasoning_start_str: str
    reasoning_end_str: str


class EnvironmentSettings(_Frozen):
    """Environment variables of vLLM that decide tokens or media."""

    video_loader_backend: str


class EngineSettings(_Frozen):
    """Settings that change answers in the engine alone. Only compared, not used by frontends."""

    quantization: str | None
    logits_processors: _Listed[str]


class CacheSettings(_Frozen):
    """Settings that decide block hashes, resolved by the started engine. ``block_size`` is in
    tokens; ``none_hash`` stands for the first block's parent, a hex digest."""

    block_size: int = Field(gt=0, le=1 << 20)
    hash_algorithm: str
    none_hash: str = Field(pattern="^([0-9a-f]{2})+$", max_length=128)
    enable_prefix_caching: bool


class Adapter(_Frozen):
    """A LoRA adapter, as in vLLM's ``--lora-modules``. Name and path enter block hashes."""

    name: Annotated[str, AfterValidator(_name)]
    path: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_on_one_line)]
    base_model_name: Annotated[str, AfterValidator(_name)] | None = None
    is_3d_lora_weight: bool = False


class PrefixReuse(_Frozen):
    """How much of a cached prefix the engine reuses. May differ between workers.

    Attributes:
        drops_last_block: the last block of a hit is recomputed, for drafting layers.
        drops_in_windows: also in groups of layers with a window, if there are other groups.
        keeps_tails: groups with a window or a state keep only what a repeated prompt needs.
    """

    drops_last_block: bool
    drops_in_windows: bool
    keeps_tails: bool


class Capacity(_Frozen):
    """Capacity of one rank, and its model runner: vLLM's second, its default on GPUs, takes
    parameters that the first one refuses. May differ between workers."""

    use_v2_model_runner: bool = False
    num_blocks: Amount
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    encoder_cache_tokens: int = Field(ge=0, le=1 << 32)


class KvEventSource(_Frozen):
    """ZMQ endpoints of one data-parallel rank's KV events."""

    rank: Rank
    endpoint: str
    replay_endpoint: str | None
    topic: str
    buffer_steps: Amount


class HostIdentity(_Frozen):
    """The worker's host, for people. Never used to choose a transport."""

    hostname: str = Field(max_length=1024)
    pid: Amount


class WorkerState(StrEnum):
    """READY takes requests. DRAINING finishes its requests and takes no more."""

    READY = "ready"
    DRAINING = "draining"


class WorkerCard(_Frozen):
    """Everything a frontend must know to use a worker.

    Attributes:
        ranks: ascending, numbered over the whole group of workers.
        fleet_key: fingerprint of the key that its sockets demand; None if unencrypted.
    """

    card_version: int = CARD_VERSION
    worker_id: Annotated[WorkerId, AfterValidator(_name)]
    incarnation: Annotated[Incarnation, AfterValidator(_name)]
    state: WorkerState
    vllm_version: str
    served_model_names: _Listed[str] = Field(min_length=1)
    supported_tasks: _Listed[str]
    model: ModelSettings
    output: OutputSettings
    environment: EnvironmentSettings
    engine: EngineSettings
    cache: CacheSettings
    reuse: PrefixReuse
    capacity: Capacity
    adapters: _Listed[Adapter] = Field(default=[], max_length=MAX_ADAPTERS)
    ranks: _Listed[Rank] = Field(min_length=1, max_length=MAX_RANKS)
    request_endpoint: str
    kv_event_sources: _Listed[KvEventSource] = Field(max_length=MAX_RANKS)
    fleet_key: Annotated[str, AfterValidator(_name)] | None = None
    host: HostIdentity

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.ranks != sorted(set(self.ranks)):
            raise ValueError("ranks must be ascending, each once")
        sources = [source.rank for source in self.kv_event_sources]
        if len(set(sources)) < len(sources) or not set(sources) <= set(self.ranks):
            raise ValueError("each KV event source must be of another rank of the worker")
        return self

    @classmethod
    def from_json(cls, data: bytes) -> "WorkerCard":
        """Parse a card. Raises CardError: not JSON, too large, of another version, or a field is
        missing, unknown or out of range."""
        try:
            # First, since cards of another version have other fields.
            version = CARD_LIMITS.read(_any_version, data)
            if version.card_version not in (CARD_VERSION, None):
                whose, which = _shown(version.worker_id), _shown(str(version.card_version))
                raise CardError(
                    f"card of worker {whose} has version {which}, "
                    f"this frontend reads version {CARD_VERSION}"
                )
            return CARD_LIMITS.read(_this_version, data)
        except MalformedJsonError as error:
            raise CardError(f"malformed card: {error}") from error

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


_any_version: Final = TypeAdapter(_Version)
_this_version: Final = TypeAdapter(WorkerCard)


def check_compatible(ours: WorkerCard, theirs: WorkerCard) -> None:
    """Refuse a card of our vLLM version under which tokens or hashes would differ from ours. Raises
    CardIncompatibleError: names the first differing field and both values."""
    if theirs.served_model_names != ours.served_model_names:
        raise CardIncompatibleError(
            theirs.worker_id,
            "served_model_names",
            ours.served_model_names,
            theirs.served_model_names,
        )
    for section in ("model", "output", "environment", "engine", "cache"):
        our_part: BaseModel = getattr(ours, section)
        their_part: BaseModel = getattr(theirs, section)
        for field in type(our_part).model_fields:
            our_value, their_value = getattr(our_part, field), getattr(their_part, field)
            if our_value != their_value:
                raise CardIncompatibleError(
                    theirs.worker_id, f"{section}.{field}", our_value, their_value
                )
