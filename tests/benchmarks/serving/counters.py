"""What servers count by themselves, read from their ``/metrics`` before a block and after it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.benchmarks.serving.contenders import Family

Sums = Mapping[str, float]
"""By the name of a sample, over all its labels and all pages."""

_PREDICTED: Final = "mmrouter_predicted_cached_tokens_total"
_RUNS: Final = "mmrouter_hf_processor_runs"
_SENT: Final = "mmrouter_tensor_bytes_sent_total"
_LOOKED_UP: Final = "vllm:mm_cache_queries_total"
_FOUND: Final = "vllm:mm_cache_hits_total"
_READ: Final = frozenset((_PREDICTED, _RUNS, _SENT, _LOOKED_UP, _FOUND))


@dataclass(frozen=True)
class Counters:
    """Since the start; None where nobody says.

    Attributes:
        predicted: cached tokens that routing expected.
        processor_runs: calls of the Hugging Face processor for media. vLLM's own server does not
            count them: there it is the media that its cache did not have.
        moved_bytes: of processed media, from frontends to workers.
    """

    predicted: float | None = None
    processor_runs: float | None = None
    moved_bytes: float | None = None

    def since(self, before: "Counters") -> "Counters":
        """What came between two readings."""
        return Counters(
            **{
                field.name: _between(getattr(before, field.name), getattr(self, field.name))
                for field in fields(self)
            }
        )


def _between(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before


async def counters(http: aiohttp.ClientSession, family: Family, pages: Sequence[str]) -> Counters:
    """What a contender's servers count.

    Args:
        pages: addresses of all of them.
    """
    if family is Family.DYNAMO:
        return Counters()  # its names are other ones
    return read(family, await asyncio.gather(*(_page(http, page) for page in pages)))


async def _page(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/metrics") as reply:
        reply.raise_for_status()
        return await reply.text()


def read(family: Family, pages: Sequence[str]) -> Counters:
    """From pages in Prometheus's format."""
    sums = _sums(pages)
    if family is Family.OURS:
        return Counters(sums[_PREDICTED], sums[_RUNS], sums[_SENT])
    return Counters(processor_runs=sums[_LOOKED_UP] - sums[_FOUND])


def _sums(pages: Sequence[str]) -> Sums:
    sums = dict.fromkeys(_READ, 0.0)
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
    return sums
