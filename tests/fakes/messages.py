"""One good message of each kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from common.identity import BlockHash, Incarnation, MmHash, RequestId, WorkerId
from common.request_plane.loop_socket import Frame
from common.request_plane.operations import Outcome, Sleep
from common.request_plane.protocol import (
    Abort,
    Ack,
    AskFigures,
    Coming,
    Failed,
    FailureKind,
    Figures,
    Goodbye,
    Hello,
    Leave,
    MediaPart,
    Nack,
    Operate,
    Operated,
    Output,
    Outputs,
    Ping,
    Status,
    Submit,
    Supply,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.request_plane.step_sums import RankStatus
from common.request_plane.wire import Codec
from common.transfer.arena.layout import ArenaOffer
from common.transfer.handshake import NixlOffer, TransferOffer, TransferReply
from common.transfer.metadata import (
    InlineMetadata,
    encode_metadata,
)

R = RequestId("r")


H = MmHash("ab" * 32)


ITEM: dict[str, Any] = {"mm_hash": H, "envelope_size": 10, "buffer_sizes": (5, 0)}


ARENA = ArenaOffer(
    name="mmrouter-arena-1-2-" + "0" * 16, size=1 << 20, generation=3, nonce="0" * 64
)


OFFER = TransferOffer(
    shm=ARENA,
    nixl=NixlOffer(agent="f", metadata="AAAA", address=4096, arena=ARENA, checksum_key="ab" * 32),
)


TO_WORKER: list[msgspec.Struct] = [
    Hello(1, Incarnation("f"), OFFER.model_dump_json().encode()),
    Submit(
        R,
        [1, 2, 3],
        SamplingParams(n=2, stop=["a"], seed=7, logprobs=3),
        [MediaPart("image", H, 0, 2, b"\x01\x00")],
        [encode_metadata(InlineMetadata(**ITEM))],
        prompt_embeds=torch.zeros(32, 128),
        cache_salt="salt",
        new_blocks=[BlockHash(b"b" * 32)],
    ),
    Submit(R, [1], None, [], [], pooling_params=PoolingParams(task="embed", dimensions=8)),
    Supply(R, [b"{}"]),
    Abort(R),
    Ping(),
    AskFigures(7),
    Operate(8, Sleep(1, "wait")),
    Leave(),
]


TO_FRONTEND: list[msgspec.Struct] = [
    Welcome(1, WorkerId("w"), Incarnation("i"), TransferReply(shm=True).model_dump_json().encode()),
    Goodbye("why"),
    Ack(R, [H]),
    Nack(R, [H], "not_held"),
    Outputs(
        [
            Output(
                R,
                [
                    CompletionOutput(
                        0, "x", [1], 0.5, [{1: Logprob(0.5, 1, "x")}], finish_reason="stop"
                    )
                ],
                finished=True,
            ),
            Output(R, [], finished=True, pooled=torch.zeros(2, 300)),
        ]
    ),
    Failed(R, FailureKind.MEDIA, "why"),
    Status([RankStatus(0, 1, 2, 0.5, 3, 4, 5)], 6, [Coming(0, [BlockHash(b"b" * 32)], [H])]),
    Figures(7, b"# TYPE up gauge"),
    Operated(8, Outcome.REFUSED, "why"),
]


def frames_of(message: msgspec.Struct, side: Any) -> list[bytes]:
    codec: Codec[Any] = Codec(side)
    return [bytes(frame) for frame in codec.encode(message, [b"media"])]


@dataclass(frozen=True)
class Side:
    """One direction of the request plane. Hypothesis warns of long names, in place of the error
    that it has found.
    """

    type: Any
    originals: list[list[bytes]] = field(repr=False)

    def decode(self, frames: Sequence[Frame]) -> None:
        codec: Codec[msgspec.Struct] = Codec(self.type)
        # ZeroMQ's frames are writable memory of their own.
        message, media = codec.decode([memoryview(bytearray(frame)) for frame in frames])
        assert isinstance(message, msgspec.Struct)
        assert len(media) < len(frames)


TO_WORKER_SIDE = Side(ToWorker, [frames_of(message, ToWorker) for message in TO_WORKER])


TO_FRONTEND_SIDE = Side(ToFrontend, [frames_of(message, ToFrontend) for message in TO_FRONTEND])
