"""The errors of this project, each a sentence that a user or operator can act on.

Low-level exceptions (zmq, OSError, msgspec, pydantic) are mapped to these at the
boundary where they occur; the HTTP status a user sees is part of the type.
"""

import math
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import ClassVar, Final

from common.identity import MmHash

LONGEST_VALUE: Final = 400  # characters of a value that stands on a card, in a sentence about it


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that it came from, and so on to the first. Each once: nothing keeps an
    error from being its own cause."""
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


class MmRouterError(Exception):
    """Root of the tree.

    Attributes:
        status: HTTP status with which the error reaches a user.
        retryable: whether another worker may succeed where this one failed.
        blames_worker: whether it is held against the worker that it came from.
        may_be_deadly: whether an engine may have died of the request.
        exit_status: of a process that ends with it.
    """

    exit_status: ClassVar[int] = 1
    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    retryable: ClassVar[bool] = False
    blames_worker: ClassVar[bool] = False
    may_be_deadly: ClassVar[bool] = False


class ConfigurationError(MmRouterError):
    """A flag, an environment variable or a combination of them is unusable."""


class NoDeviceError(MmRouterError):
    """The installed vLLM computes on GPUs, and this process sees none."""


class ProtocolError(MmRouterError):
    """A message on the request plane could not be understood."""


class ProtocolVersionError(ProtocolError):
    """Frontend and worker speak different versions of the request plane."""


class UnsendableRequestError(MmRouterError):
    """A value of a request has no encoding: half a letter (a surrogate), or too large a number."""

    status = HTTPStatus.BAD_REQUEST


class DuplicateRequestError(ProtocolError):
    """A request has the id of another one that has not ended."""


class DiscoveryError(MmRouterError):
    """Cards can't be published or read."""

    # As for a command line that is wrong: it names a place that is of no use.
    exit_status: ClassVar[int] = 2


class CardError(MmRouterError):
    """A card is malformed; the dotted name of the field that is wrong is for counters."""

    field: str = "card"


class CardIncompatibleError(CardError):
    """A worker's card would make hashes or tokens differ from the fleet's: names the first field
    that differs, dotted, with our value and theirs."""

    def __init__(self, worker_id: str, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(
            f"worker {worker_id} refused: {field} is {_cut(theirs)} on its card "
            f"but {_cut(ours)} in this fleet, so tokens or block hashes would differ"
        )


def _cut(value: object) -> str:
    """A value as part of a sentence, which users see too."""
    whole = repr(value)
    return whole if len(whole) <= LONGEST_VALUE else f"{whole[:LONGEST_VALUE]}..."


class CardKeyError(CardError):
    """A worker's card says that it can't be trusted, or that it would not trust us."""

    field = "fleet_key"


class CardNameError(CardError):
    """Another worker already serves under the worker id of this card."""

    field = "worker_id"


class CardModelError(CardError):
    """A worker's model can't be served beside the others that this frontend has, or not at all."""

    field = "model"


class CardCodeError(CardError):
    """A worker's model brings code of its own, which this frontend must not run."""

    field = "model.trust_remote_code"


class NoWorkerError(MmRouterError):
    """No worker is registered that could take the request."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class OverloadedError(MmRouterError):
    """There is more to do than can be done; the same request may succeed in so many seconds."""

    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = max(1, math.ceil(retry_after_s))
        super().__init__(message)


class FleetBusyError(OverloadedError):
    """Every worker has more to do than it should be given."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class WorkerBusyError(NoWorkerError):
    """The worker's own admission control refused the request."""

    retryable = True


class NotRoutedError(MmRouterError):
    """vLLM's server asked for something that a fleet of engines can't do."""

    status = HTTPStatus.NOT_IMPLEMENTED


class SaltLostError(MmRouterError):
    """A request's ``cache_salt`` was not known when its media were looked up."""


class WorkerLostError(MmRouterError):
    """The worker that had the request went away before finishing it."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    blames_worker = True


class WorkerDiedError(WorkerLostError):
    """The worker went away without a word, with the request in its hands."""

    may_be_deadly = True


class WorkerLeftError(WorkerLostError):
    """The worker ended the session, and said so."""

    blames_worker = False


class WorkerGarbledError(WorkerLostError):
    """The worker sent something that can't be read."""


class WorkerStalledError(WorkerLostError):
    """The worker is there, but has not answered any of its requests for long."""


class SlowClientError(MmRouterError):
    """The client does not read the stream that it asked for."""

    status = HTTPStatus.REQUEST_TIMEOUT


class OutputTimeoutError(WorkerLostError):
    """The worker is alive but said nothing on this request for too long."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    blames_worker = False  # the request may have waited in its queue


class DeadlineExceededError(MmRouterError):
    """The request took longer than the operator allows."""

    status = HTTPStatus.GATEWAY_TIMEOUT


class ThreadStuckError(MmRouterError):
    """A thread did not return from what it did for a request, and was replaced."""

    # As where a process hangs: the same request would take the next thread too, and clients try
    # again what is answered with a 5xx.
    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, threads: str) -> None:
        super().__init__(
            f"the {threads} thread that worked on this request did not return within its time "
            "limit (--media-decode-timeout), so the request was given up"
        )


class TooManyStuckThreadsError(MmRouterError):
    """So many threads are stuck that the process had better be started again."""


class RetryBudgetError(MmRouterError):
    """Another worker might have succeeded, but too many requests were tried again lately: there may
    be another try in so many seconds."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, cause: MmRouterError, wait_s: float) -> None:
        self.cause = cause
        self.wait_s = wait_s
        super().__init__(f"{cause}; it was not tried again, since too many requests were lately")


class EnginesDiedError(MmRouterError):
    """Several engines died while they had the request, at one place of its answer."""

    def __init__(self, cause: MmRouterError, count: int) -> None:
        self.cause = cause
        super().__init__(
            f"{cause}; it is engine number {count} that died with this request at the same place "
            "of its answer, so no further one gets it"
        )


class NotResumableError(MmRouterError):
    """The worker was lost after some output, and no other can go on from there, for a reason."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the worker was lost after some output, which can't be continued: {reason}"
        )


class BodyError(MmRouterError):
    """A request's body is not one that will be read to its end."""

    status = HTTPStatus.BAD_REQUEST


class BodyTooLargeError(BodyError):
    """It is larger than the operator allows."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyTooSlowError(BodyError):
    """It did not arrive in time."""

    status = HTTPStatus.REQUEST_TIMEOUT


class BodyEncodedError(BodyError):
    """It is compressed; nothing is unpacked here."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


class RequestRejectedError(MmRouterError):
    """The request is invalid: for this frontend, or for the worker's engine."""

    status = HTTPStatus.BAD_REQUEST


class EngineFailedError(MmRouterError):
    """The worker's engine failed on this request."""

    blames_worker = True


class EngineGoneError(EngineFailedError):
    """The worker's engine is dead; the worker can't serve any more."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    may_be_deadly = True


class OperationRefusedError(MmRouterError):
    """The worker's engine does not do what an operator wants, and did nothing of it."""


class TransferError(MmRouterError):
    """Processed tensors could not be moved from the frontend to a worker."""

    retryable = True


class UnsupportedItemError(TransferError):
    """A processed item holds something other than tensors, lists of them and numbers."""

    retryable = False


class ArenaFullError(TransferError):
    """No room: every segment that could make way is still leased, or a worker has no memory for
    an item."""


class NoEncodedFormError(TransferError):
    """Only the processed tensors of a medium are there, not the file as its user sent it."""


class ArenaUnavailableError(TransferError):
    """The arena's shared memory can't be created or mapped here."""


class StaleSegmentError(TransferError):
    """The segment was reclaimed, so its bytes now belong to another item."""


class CorruptSegmentError(TransferError):
    """A segment or frame doesn't hold what its metadata promises."""


class TransferTimeoutError(TransferError):
    """A read didn't complete before its deadline."""


class MediaMissingError(TransferError):
    """The worker lacks media items and needs them sent, each once; the reason is for counters."""

    def __init__(self, missing: Iterable[MmHash], reason: str) -> None:
        self.missing = list(dict.fromkeys(missing))
        self.reason = reason
        super().__init__(f"{len(self.missing)} media items are missing ({reason})")


class MediaUnavailableError(TransferError):
    """A media item could not be given to the engine, whatever was tried."""

    blames_worker = True
