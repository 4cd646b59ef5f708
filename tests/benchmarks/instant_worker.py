"""A worker whose engine answers at once: what is left is the frontend's work.

    python -m tests.benchmarks.instant_worker MODEL DISCOVERY_DIR MAX_MODEL_LEN MEDIA_PER_PROMPT

It is a real worker as far as a frontend can tell: a card, the request plane, and media that it
maps. Nothing is computed on them.
"""

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import uvloop
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.outputs import CompletionOutput, RequestOutput

from backend_worker.engine.adapters import Adapters
from backend_worker.engine.vllm_engine import Items, RankLoad
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.discovery.file import FileCardPublisher
from common.errors import CorruptSegmentError, MediaMissingError
from common.identity import Incarnation, MmHash, WorkerId
from common.request_plane.card import Capacity
from common.request_plane.operations import Operation
from common.request_plane.protocol import Submit
from common.request_plane.step_sums import StepSums
from common.transfer.base import MediaSource
from common.transfer.transports import receivers
from common.vllm_compat.features import INSTALLED
from tests.fakes.cards import make_card


class InstantEngine:
    """One token for every request; holds all media that it ever got."""

    errored = False
    hf_processor_runs = 0
    ranks = (0,)

    def __init__(self) -> None:
        self._held: set[MmHash] = set()
        self.adapters = Adapters()

    def holds(self, mm_hash: MmHash) -> bool:
        return mm_hash in self._held

    def load(self) -> dict[int, RankLoad]:
        return {}

    def steps(self) -> list[StepSums]:
        return []

    async def log_statistics(self) -> None:
        pass

    async def generate(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        wanted = {part.mm_hash for part in submit.media}
        if missing := [each for each in wanted if each not in items and each not in self._held]:
            raise MediaMissingError(missing, "not_held")
        self._held.update(items)
        completion = CompletionOutput(0, "x", [1], None, None, finish_reason="length")
        yield RequestOutput("r", None, None, None, [completion], True, num_cached_tokens=0)

    async def settled(self) -> None:
        pass

    def refuses(self, operation: Operation) -> str:
        return ""

    async def operate(self, operation: Operation) -> None:
        self._held.clear()

    async def rests(self) -> bool:
        return False


async def _no_rendering(source: MediaSource) -> tuple[MmHash, MultiModalKwargsItem]:
    raise CorruptSegmentError(f"{source.modality} should have been transferred")


async def run(model: str, directory: Path, max_model_len: int, media: int) -> None:
    service = WorkerService(
        InstantEngine(),
        MediaReceiver(receivers(_no_rendering)),
        WorkerId("instant"),
        Incarnation("i0"),
        "tcp://127.0.0.1:0",
    )
    card = make_card(
        "instant",
        vllm_version=INSTALLED,
        model={
            "model": model,
            "max_model_len": max_model_len,
            "limit_mm_per_prompt": {"image": {"count": media}},
            "tokenizer": model,
        },
        capacity=Capacity(
            num_blocks=1 << 20,
            max_num_seqs=1024,
            max_num_batched_tokens=1 << 20,
            encoder_cache_tokens=1 << 20,
        ),
        request_endpoint=service.endpoint,
    )
    async with FileCardPublisher(directory) as publisher:
        await publisher.publish(card)
        await service.run()


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
