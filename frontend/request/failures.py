"""What a worker says went wrong, as one of our errors."""

from typing import Final

from common.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineGoneError,
    MediaUnavailableError,
    MmRouterError,
    ProtocolError,
    RequestRejectedError,
    WorkerBusyError,
    WorkerLostError,
)
from common.identity import WorkerId
from common.request_plane.protocol import Failed, FailureKind

LONGEST_MESSAGE: Final = 16_384
"""Characters that a client and the log get of what a worker says."""


def failure(worker_id: WorkerId, failed: Failed) -> MmRouterError:
    """The error of a failed request, which says whether another worker may succeed."""
    said = failed.message[:LONGEST_MESSAGE]
    message = f"worker {worker_id}: {said}"
    match failed.kind:
        case FailureKind.INVALID:
            return RequestRejectedError(said)
        case FailureKind.BUSY:
            return WorkerBusyError(message)
        case FailureKind.MEDIA:
            return MediaUnavailableError(message)
        case FailureKind.ENGINE_DEAD:
            return EngineGoneError(message)
        case FailureKind.ENGINE:
            return EngineFailedError(message)
        case FailureKind.ABORTED:
            return WorkerLostError(message)
        case FailureKind.LATE:
            return DeadlineExceededError(message)
        case FailureKind.PROTOCOL:
            return ProtocolError(message)
