"""How many frontends a fleet needs, and how large they are: the model of docs/scale.md.

    python -m examples.scale --workers 200 --rps 2000 --image 1024x1024 --output-tokens 300

``--page`` prints the tables of that page. Nothing was measured at this size: constants come from
one machine with two cores, and the page says which of them are guesses.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self


class Constant(NamedTuple):
    """A number that the model takes as given.

    Attributes:
        kind: measured, computed from what was measured, or assumed.
        source: where it comes from.
    """

    value: float
    unit: str
    what: str
    kind: str
    source: str


TOKEN_US: Final = Constant(
    32, "us", "event loop, for each streamed token", "computed",
    "`make bench-tokens`: 36 where vLLM's own server takes 110, which took 98 when the others "
    "here were measured",
)  # fmt: skip
NEW_MS: Final = Constant(
    19, "ms", "media process, for a new picture of 1024x1024", "measured",
    "[media](media.md#processing)",
)  # fmt: skip
REPEAT_MS: Final = Constant(
    2.0, "ms", "event loop, for a picture beyond a request of text", "measured",
    "[media](media.md#processing)",
)  # fmt: skip
BASE_MS: Final = Constant(
    5.0, "ms", "event loop, for a request without picture and tokens", "computed",
    "what the three above leave of 14 to 17 ms for a request with a picture of 896x896, half of "
    "them new, and 16 tokens: 4 to 7",
)  # fmt: skip
EVENTS_PER_S: Final = Constant(
    1_104_000, "", "block events that one core applies in a second", "measured",
    "[routing](routing.md#measured)",
)  # fmt: skip
MESSAGE_US: Final = Constant(
    25, "us", "event loop, for each message of KV events beyond its blocks", "assumed",
    "that of receiving a token in a message of its own, sampled",
)  # fmt: skip
MESSAGES_PER_S: Final = Constant(
    40, "", "messages of KV events from a worker in a second", "assumed",
    "one for each step of its engine",
)  # fmt: skip
BLOCK_BYTES: Final = Constant(
    132, "bytes", "index, for each block that a worker holds", "measured",
    "[routing](routing.md#measured)",
)  # fmt: skip
EVENT_BYTES: Final = Constant(
    138, "bytes", "KV events, for a block that is stored and later removed", "computed",
    "103 and 35, encoded with vLLM's own structures, 64 blocks in a message",
)  # fmt: skip
PIXEL_BYTES: Final = Constant(
    1176, "bytes", "tensors of Qwen2-VL, for each patch of 14x14 pixels", "measured",
    "6.4 MB for 1024x1024",
)  # fmt: skip
INLINE_MS: Final = Constant(
    0.36, "ms/MB", "sending tensors inline, both ends", "measured",
    "2.33 ms for 6.4 MB: [transfer](transfer.md#measured)",
)  # fmt: skip
OUTPUT_BYTES: Final = Constant(
    218, "bytes", "request plane, for each streamed token", "computed",
    "an `Output` with one token, encoded, 64 of them in a message",
)  # fmt: skip
PROMPT_BYTES: Final = Constant(
    4.1, "bytes", "request plane, for each token of a prompt", "computed", "encoded",
)  # fmt: skip
SOCKETS: Final = Constant(
    3,
    "",
    "sockets of a frontend for each worker",
    "measured",
    "`common/request_plane/fleet_sockets.py`",
)
DECISIONS_US: Final = ((10, 234), (100, 352), (1000, 717))
"""Workers, and the median time of a decision: docs/routing.md."""

CONSTANTS: Final = (
    TOKEN_US, NEW_MS, REPEAT_MS, BASE_MS, EVENTS_PER_S, MESSAGE_US, MESSAGES_PER_S, BLOCK_BYTES,
    EVENT_BYTES, PIXEL_BYTES, INLINE_MS, OUTPUT_BYTES, PROMPT_BYTES, SOCKETS,
)  # fmt: skip

PATCH, MERGED, BLOCK_TOKENS = 14, 2, 16


@dataclass(frozen=True)
class Load:
    """What a fleet has to do.

    Attributes:
        image: width and height in pixels; None for requests without pictures.
        text_tokens: of a prompt, the picture's aside.
        new: share of pictures that their frontend has not processed yet.
        cached: share of prompt tokens that the chosen worker holds.
        kv_tokens: that the KV cache of a worker holds.
        tokens_per_s: that one stream gets.
        keep_s: how long a processed picture should stay in the arena.
        busy: share of its core that an event loop should be busy for at most.
        tokens_per_message: that workers send at once, vLLM's --stream-interval.
    """

    workers: int
    rps: float
    image: tuple[int, int] | None = (1024, 1024)
    output_tokens: int = 300
    text_tokens: int = 200
    new: float = 0.5
    cached: float = 0.5
    kv_tokens: int = 500_000
    tokens_per_s: float = 50.0
    keep_s: float = 60.0
    busy: float = 0.7
    tokens_per_message: int = 1

    @property
    def patches(self) -> int:
        """Of a picture, whose sides are rounded to whole tokens."""
        if self.image is None:
            return 0
        side = PATCH * MERGED
        width, height = (max(1, round(each / side)) * MERGED for each in self.image)
        return width * height

    @property
    def prompt_tokens(self) -> int:
        """All of a prompt."""
        return self.text_tokens + self.patches // MERGED**2

    @property
    def picture_mb(self) -> float:
        """Tensors of a picture, in 10^6 bytes."""
        return self.patches * PIXEL_BYTES.value / 1e6


@dataclass(frozen=True)
class Estimate:
    """What that takes.

    Attributes:
        tokens_cores, requests_cores, inline_cores: of event loops, all frontends together.
        media_cores: of media processes (--preprocess-workers), all frontends together.
        block_events: in a second; every frontend gets all of them.
        events_core: share of its core that each frontend needs for them.
        frontends: processes; None if events alone are more than one can be busy for.
        index_gb: of each frontend, and ``arena_gb`` too; in 2^30 bytes.
        to_workers_mb, from_workers_mb: of the request plane in a second, all frontends together.
        event_mb: that each worker publishes in a second, to all frontends together.
    """

    load: Load
    tokens_cores: float
    requests_cores: float
    inline_cores: float
    media_cores: float
    block_events: float
    events_core: float
    frontends: int | None
    index_gb: float
    arena_gb: float
    to_workers_mb: float
    from_workers_mb: float
    event_mb: float
    streams: float
    sockets: int

    @classmethod
    def of(cls, load: Load) -> Self:
        """The model."""
        rps, tokens = load.rps, load.rps * load.output_tokens
        messages = tokens / load.tokens_per_message
        shown = load.new if load.image else 0.0
        picture = REPEAT_MS.value if load.image else 0.0
        base_ms = BASE_MS.value + picture + (decision_us(load.workers) - decision_us(4)) / 1e3
        shipped_mb = rps * shown * load.picture_mb
        stored = load.prompt_tokens * (1 - load.cached) + load.output_tokens
        block_events = rps * stored / BLOCK_TOKENS * 2  # each is removed once, too
        events_core = block_events / EVENTS_PER_S.value
        events_core += load.workers * MESSAGES_PER_S.value * MESSAGE_US.value / 1e6
        cores = (
            messages * TOKEN_US.value / 1e6,
            rps * base_ms / 1e3,
            shipped_mb * INLINE_MS.value / 1e3,
        )
        left = load.busy - events_core
        frontends = math.ceil(sum(cores) / left) if left > 0 else None
        return cls(
            load,
            *cores,
            media_cores=rps * shown * NEW_MS.value / 1e3 * load.patches / 5476,
            block_events=block_events,
            events_core=events_core,
            frontends=frontends,
            index_gb=load.workers * load.kv_tokens / BLOCK_TOKENS * BLOCK_BYTES.value / 2**30,
            arena_gb=shipped_mb * 1e6 * load.keep_s / (frontends or 1) / 2**30,
            to_workers_mb=shipped_mb + rps * load.prompt_tokens * PROMPT_BYTES.value / 1e6,
            from_workers_mb=messages * OUTPUT_BYTES.value / 1e6,
            event_mb=block_events / 2 * EVENT_BYTES.value / load.workers * (frontends or 1) / 1e6,
            streams=tokens / load.tokens_per_s,
            sockets=int(load.workers * SOCKETS.value),
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """The lines of a table."""
        load, count = self.load, self.frontends
        yield "workers", f"{load.workers:,}"
        yield "requests a second", f"{load.rps:,.0f}"
        yield "output tokens a second", f"{load.rps * load.output_tokens:,.0f}"
        yield "streams at once", f"{self.streams:,.0f}"
        yield "event loops: tokens, cores", f"{self.tokens_cores:,.1f}"
        yield "event loops: requests, cores", f"{self.requests_cores:,.1f}"
        yield "event loops: media inline, cores", f"{self.inline_cores:,.1f}"
        yield "block events a second, to each frontend", f"{self.block_events:,.0f}"
        yield "events, share of each frontend's core", f"{self.events_core:.2f}"
        yield "**frontend processes**", "none is enough" if count is None else f"**{count:,}**"
        yield "media processes, cores, all together", f"{self.media_cores:,.1f}"
        yield "index of each frontend, GiB", f"{self.index_gb:.2f}"
        yield "arena of each frontend, GiB", "" if count is None else f"{self.arena_gb:.2f}"
        yield "request plane to workers, MB/s", f"{self.to_workers_mb:,.0f}"
        yield "request plane from workers, MB/s", f"{self.from_workers_mb:,.0f}"
        yield "KV events from each worker, MB/s", "" if count is None else f"{self.event_mb:,.1f}"
        yield "sockets of each frontend", f"{self.sockets:,}"


def decision_us(workers: int) -> float:
    """Between, and beyond, what was measured along straight lines."""
    (low, at_low), (high, at_high) = DECISIONS_US[:2] if workers < 100 else DECISIONS_US[1:]
    return at_low + (workers - low) * (at_high - at_low) / (high - low)


SMALL: Final = Load(8, 40)
LARGE: Final = Load(200, 2_000)
HUGE: Final = Load(1_000, 10_000)
PAGE: Final = {
    "sizes": (SMALL, LARGE, HUGE),
    "remedies": (
        LARGE,
        replace(LARGE, tokens_per_message=4),
        replace(LARGE, workers=50, rps=500),
        replace(LARGE, workers=50, rps=500, tokens_per_message=4),
    ),
}
"""What docs/scale.md shows, by the name of the table."""


def table(loads: Sequence[Load]) -> str:
    """Markdown: a column for each load."""
    columns = [dict(Estimate.of(load).rows()) for load in loads]
    names = list(columns[0])
    lines = ["| |" + " |" * len(columns), "|---|" + "---:|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(each[name] for each in columns) + " |" for name in names]
    return "\n".join(lines)


def constants() -> str:
    """Markdown: what the model takes as given."""
    lines = ["| what | value | | from |", "|---|---:|---|---|"]
    lines += [
        f"| {each.what} | {each.value:,} {each.unit}".rstrip() + f" | {each.kind} | {each.source} |"
        for each in CONSTANTS
    ]
    return "\n".join(lines)


def _size(text: str) -> tuple[int, int] | None:
    if text == "none":
        return None
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 1024x1024, nor none")
    return int(width), int(height)


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.scale", description="The cost model of docs/scale.md."
    )
    parser.add_argument("--workers", type=_count, default=LARGE.workers)
    parser.add_argument("--rps", type=_positive, default=LARGE.rps, help="requests a second")
    parser.add_argument("--image", type=_size, default=LARGE.image, help="1024x1024, or none")
    parser.add_argument("--output-tokens", type=_count, default=LARGE.output_tokens)
    parser.add_argument("--text-tokens", type=_count, default=LARGE.text_tokens)
    parser.add_argument("--new", type=_share, default=LARGE.new, help="share of new pictures")
    parser.add_argument("--cached", type=_share, default=LARGE.cached, help="share of a prompt")
    parser.add_argument("--kv-tokens", type=_count, default=LARGE.kv_tokens, help="of a worker")
    parser.add_argument("--tokens-per-s", type=_positive, default=LARGE.tokens_per_s)
    parser.add_argument("--keep-s", type=_positive, default=LARGE.keep_s, help="in the arena")
    parser.add_argument("--busy", type=_share, default=LARGE.busy, help="share of a core")
    parser.add_argument("--tokens-per-message", type=_count, default=1, help="--stream-interval")
    parser.add_argument("--page", action="store_true", help="print the page's tables")
    given = vars(parser.parse_args(argv))
    if given.pop("page"):
        print(constants(), *map(table, PAGE.values()), sep="\n\n")
        return
    for name, value in Estimate.of(Load(**given)).rows():
        print(f"{name.strip('*'):40} {value.strip('*'):>16}")


if __name__ == "__main__":
    main()
