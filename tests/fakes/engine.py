"""An engine that does what a test says."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalKwargsItem,
)
from vllm.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)

from backend_worker.engine.adapters import Adapters
from backend_worker.engine.vllm_engine import Items, RankLoad
from common.errors import (
    CorruptSegmentError,
    MediaMissingError,
)
from common.identity import MmHash
from common.request_plane.operations import (
    LoadLoraAdapter,
    Operation,
    Pause,
    Resume,
    Sleep,
    UnloadLoraAdapter,
    WakeUp,
    empties_media,
)
from common.request_plane.protocol import (
    Submit,
)
from common.request_plane.step_sums import StepSums
from common.transfer.base import MediaSource

Script = Callable[[Submit, Items], AsyncGenerator[RequestOutput | PoolingRequestOutput]]


class ScriptedEngine:
    """Holds what it was given, and generates as a test says."""

    def __init__(self) -> None:
        self.held: set[MmHash] = set()
        self.script: Script = two_outputs
        self.adapters = Adapters()
        self.running = 0
        self.aborted = 0
        self.settled_calls = 0
        self.seen: list[dict[MmHash, torch.Tensor]] = []
        self.errored = False
        self.hf_processor_runs = 0
        self.operations: list[Operation] = []
        self.refusal = ""
        self.operating: Callable[[Operation], Awaitable[None]] = _done
        self.resting = False
        self.step_sums: list[StepSums] = []

    @property
    def ranks(self) -> Sequence[int]:
        return (0,)

    def holds(self, mm_hash: MmHash) -> bool:
        return mm_hash in self.held

    def load(self) -> dict[int, RankLoad]:
        return {0: RankLoad(running=self.running)}

    def steps(self) -> list[StepSums]:
        return self.step_sums

    async def log_statistics(self) -> None:
        pass

    async def generate(
        self, submit: Submit, items: Items
    ) -> AsyncGenerator[RequestOutput | PoolingRequestOutput]:
        missing = [
            p.mm_hash for p in submit.media if p.mm_hash not in items and p.mm_hash not in self.held
        ]
        if missing:
            raise MediaMissingError(missing, "not_held")
        pixels = {h: item["pixels"] for h, item in items.items() if "pixels" in item}
        self.seen.append({h: each.data.clone() for h, each in pixels.items()})
        self.held.update(items)
        self.running += 1
        try:
            async with aclosing(self.script(submit, items)) as outputs:
                async for output in outputs:
                    yield output
        except GeneratorExit:
            self.aborted += 1
            raise
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def settled(self) -> None:
        self.settled_calls += 1

    def refuses(self, operation: Operation) -> str:
        return self.refusal

    async def operate(self, operation: Operation) -> None:
        self.operations.append(operation)
        await self.operating(operation)
        match operation:
            case Sleep() | Pause():
                self.resting = True
            case WakeUp() | Resume():
                self.resting = False
            case LoadLoraAdapter():
                await self.adapters.add(operation, _loaded, ["demo"])
            case UnloadLoraAdapter():
                self.adapters.forget(operation)
        if empties_media(operation):
            self.held.clear()

    async def rests(self) -> bool:
        return self.resting


async def _loaded(adapter: LoRARequest) -> bool:
    return True


async def _done(operation: Operation) -> None:
    pass


def output(text: str, *, finished: bool) -> RequestOutput:
    completion = CompletionOutput(
        0, text, [1], None, None, finish_reason="stop" if finished else None
    )
    return RequestOutput("r", None, None, None, [completion], finished, num_cached_tokens=3)


def pooled(*numbers: float) -> PoolingRequestOutput:
    return PoolingRequestOutput("r", PoolingOutput(torch.tensor(numbers)), [1], 3, finished=True)


async def two_outputs(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
    yield output("a", finished=False)
    yield output("b", finished=True)


async def never(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
    await asyncio.Event().wait()
    yield output("never", finished=True)


async def no_rendering(source: MediaSource) -> tuple[MmHash, MultiModalKwargsItem]:
    raise CorruptSegmentError(f"{source.modality} should have been transferred")
