"""The router's flags. The cost formula that they weigh is in ``selector.py``."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from common.flag_settings import FlagSettings
from frontend.router.modes import RouterMode

Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class CostUnit(StrEnum):
    """In what costs are reckoned."""

    TIME = "time"
    TOKENS = "tokens"


class RouterSettings(FlagSettings):
    """What an operator may set. The cost formula is in ``selector.py``."""

    flag_group: ClassVar[str] = "routing"
    flag_prefix: ClassVar[str] = "router-"

    mode: RouterMode = Field(
        RouterMode.KV,
        description="how a worker is chosen for each request. "
        + "; ".join(f"{mode}: {mode.description}" for mode in RouterMode),
    )
    temperature: Weight = Field(
        0.0,
        description="softmax temperature over costs divided by the prompt's length; "
        "0 always takes the cheapest worker",
    )
    costs: CostUnit = Field(
        CostUnit.TOKENS,
        description="in what costs are reckoned. tokens: by the weights alone; time: milliseconds "
        "of each worker, learned from what it reports, where no weight is given",
    )
    prefill_weight: Weight = Field(
        1.0, description="cost of a prompt token that the worker has to prefill"
    )
    encode_weight: Weight = Field(
        1.0, description="cost of a media token that the worker has to encode"
    )
    ship_weight: Weight = Field(
        8.0, description="cost of one MiB of media tensors to ship, in tokens"
    )
    load_weight: Weight = Field(
        # A prefill under way is half done on average. Also: below 1, so that a prompt joins
        # its twin, whose blocks it will find, rather than compute them a second time.
        0.5,
        description="cost of a token that waits for prefill on the worker already",
    )
    decode_weight: Weight = Field(
        0.05, description="cost of a token in the context of a request that is decoding there"
    )
    queue_weight: Weight = Field(
        512.0, description="cost of a request in the worker's queue, in tokens"
    )
    step_weight: Weight = Field(
        # Half a step of a 7B model on an H100 takes as long as prefilling so many tokens.
        100.0,
        description="cost of a worker whose engine has requests already, in tokens: the step that "
        "runs has to end before a prompt is begun, half a step on average",
    )
    spread: bool = Field(
        True,
        description="prefer an idle worker to one with a queue, whatever its cache holds",
    )
    busy_blocks_fraction: Weight = Field(
        0.95,
        description="share of its KV cache in use above which a worker gets no more requests; "
        "1 or more never",
    )
    busy_prefill_tokens: int = Field(
        262_144,
        ge=0,
        description="prompt tokens waiting for prefill from which on a worker gets no more "
        "requests; 0 never",
    )
    eject_failures: int = Field(
        3, ge=1, description="requests failing in a row that take a worker out for a while"
    )
    eject_base_s: Seconds = Field(
        1.0, description="how long it is out the first time; doubled with each relapse"
    )
    eject_max_s: Seconds = Field(60.0, description="how long it is out at most")
    stall_s: Seconds = Field(
        120.0,
        description="how long a worker with requests may stay silent on all of them before it "
        "counts as stalled and they go elsewhere",
    )
    predict_ttl_s: Seconds = Field(
        5.0,
        description="how long blocks of a routed request count as held before their event arrives",
    )
    approximate_ttl_s: Seconds = Field(
        120.0,
        description="how long blocks of a routed request count as held on a worker "
        "without KV events",
    )
    approximate_blocks: int = Field(
        2_000_000, ge=0, description="most blocks predicted at once, over all workers"
    )
    memo_tokens: int = Field(
        1_000_000,
        ge=0,
        description="tokens of recent prompts kept so that shared beginnings are not hashed "
        "again, about 10 bytes each",
    )
    media_items: int = Field(10_000, ge=1, description="most media items remembered per worker")
    report_ttl_s: Seconds = Field(
        10.0, description="how long a worker's own report of its load counts"
    )
    silence_s: Seconds = Field(
        2.0,
        description="how long a worker may serve without the events that should follow "
        "before its event stream is checked",
    )
    replay_timeout_s: Seconds = Field(
        5.0, description="how long to wait for the next message of a replay"
    )
    decisions: int = Field(
        1000, ge=1, le=1_000_000, description="routing decisions kept for inspection"
    )
    candidates: int = Field(
        16, ge=1, description="candidates recorded per decision, cheapest first"
    )
    seed: int | None = Field(None, description="seed of random choices, for repeatable runs")
