"""What a worker says went wrong, as one of our errors."""

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


def failure(worker_id: WorkerId, failed: Failed) -> MmRouterError:
    """The error of a failed request, which says whether another worker may succeed."""
    message = f"worker {worker_id}: {failed.message}"
    match failed.kind:
        case FailureKind.INVALID:
            return RequestRejectedError(failed.message)
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
