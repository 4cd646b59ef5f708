"""Errors of this project, each a sentence that a user or operator can act on.

Low-level exceptions (zmq, OSError, msgspec, pydantic) are mapped to these at the boundary where
they occur. The HTTP status is part of the type.
"""

import errno
import math
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import ClassVar, Final

from common.identity import MmHash

MAX_VALUE_LEN: Final = 400  # characters of a value that stands on a card, in a sentence about it


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: an error may be its own cause."""
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


class MmRouterError(Exception):
    """Base class.

    Attributes:
        status: HTTP status of the response.
        retryable: whether another worker may succeed where this one failed.
        blame: what counts against the worker that it came from, in words; empty if nothing does.
        may_be_deadly: whether the request may have killed an engine.
        exit_status: of a process that ends with it.
    """

    exit_status: ClassVar[int] = 1
    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    retryable: ClassVar[bool] = False
    blame: ClassVar[str] = ""
    may_be_deadly: ClassVar[bool] = False


class ConfigurationError(MmRouterError):
    """A flag, an environment variable or a combination of them is unusable."""


class ListenError(ConfigurationError):
    """No socket can listen at the address that is asked for."""

    exit_status: ClassVar[int] = 3  # uvicorn's


class NoDeviceError(MmRouterError):
    """The installed vLLM needs a GPU, and this process sees none."""


class ProtocolError(MmRouterError):
    """A message on the request plane could not be decoded."""


class ProtocolVersionError(ProtocolError):
    """Frontend and worker speak different versions of the request plane."""


class UnsendableRequestError(MmRouterError):
    """A value of a request has no encoding: a lone surrogate, or too large a number."""

    status = HTTPStatus.BAD_REQUEST


class DuplicateRequestError(ProtocolError):
    """Another request with this id is in flight."""


class DiscoveryError(MmRouterError):
    """Cards can't be published or read."""

    # As for an invalid command line: the named place is unusable.
    exit_status: ClassVar[int] = 2


class CardError(MmRouterError):
    """A card is malformed; ``field`` is the dotted name of the wrong field, for counters."""

    field: str = "card"


class CardIncompatibleError(CardError):
    """A card would make hashes or tokens differ. Names the first such field, and both values."""

    def __init__(self, worker_id: str, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(
            f"worker {worker_id} refused: {field} is {_cut(theirs)} on its card "
            f"but {_cut(ours)} in this fleet, so tokens or block hashes would differ"
        )


def _cut(value: object) -> str:
    """Shorten a value for a sentence, which users see too."""
    whole = repr(value)
    return whole if len(whole) <= MAX_VALUE_LEN else f"{whole[:MAX_VALUE_LEN]}..."


class CardKeyError(CardError):
    """A worker can't prove that it has the fleet key, or has another one."""

    field = "fleet_key"


class CardNameError(CardError):
    """Another worker already serves under the worker id of this card."""

    field = "worker_id"


class CardModelError(CardError):
    """A worker's model can't be served beside this frontend's other models, or not at all."""

    field = "model"


class CardCodeError(CardError):
    """A worker's model brings code of its own, which this frontend must not run."""

    field = "model.trust_remote_code"


class NoWorkerError(MmRouterError):
    """No registered worker could take the request."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class OverloadedError(MmRouterError):
    """A limit is reached; the same request may succeed after ``retry_after_s``."""

    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = max(1, math.ceil(retry_after_s))
        super().__init__(message)


class FleetBusyError(OverloadedError):
    """Every worker is overloaded."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class OutOfFilesError(FleetBusyError):
    """This process, or its host, can open no more files or threads, or has no memory, for now."""

    def __init__(self) -> None:
        super().__init__("this frontend can open no more files or threads, or has no memory left")

    @staticmethod
    def caused(error: BaseException) -> bool:
        """Return whether a lack of them is why an error was raised. A MemoryError that was caught
        and named as cause does not count: decoders raise it for media that claim to be large."""
        lacking = (errno.EMFILE, errno.ENFILE)
        return isinstance(error, MemoryError) or any(
            isinstance(each, OutOfFilesError)
            or getattr(each, "errno", None) in lacking
            or each.args[:1] == ("can't start new thread",)  # the text of others may be costly
            for each in causes(error)
        )


class WorkerBusyError(NoWorkerError):
    """The worker's own admission control refused the request."""

    retryable = True


class NotRoutedError(MmRouterError):
    """A fleet of engines can't do what the client asked of vLLM's server."""

    status = HTTPStatus.NOT_IMPLEMENTED


class SaltLostError(MmRouterError):
    """A request's ``cache_salt`` was not known when its media were looked up."""


class WorkerLostError(MmRouterError):
    """The worker was lost before it finished the request."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    blame = "link lost"


class WorkerDiedError(WorkerLostError):
    """The worker vanished without a message while it had the request."""

    blame = "died"
    may_be_deadly = True


class WorkerLeftError(WorkerLostError):
    """The worker announced the end of its session."""

    blame = ""


class WorkerGarbledError(WorkerLostError):
    """The worker sent an undecodable message."""

    blame = "undecodable message"


class WorkerStalledError(WorkerLostError):
    """The worker is connected, but has answered none of its requests for long."""

    blame = "stalled"


class SlowClientError(MmRouterError):
    """The client does not read its stream."""

    status = HTTPStatus.REQUEST_TIMEOUT


class OutputTimeoutError(WorkerLostError):
    """The worker is alive but sent no output of this request for too long."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    blame = ""  # the request may have waited in its queue


class DeadlineExceededError(MmRouterError):
    """The request took longer than the operator allows."""

    status = HTTPStatus.GATEWAY_TIMEOUT


class ThreadStuckError(MmRouterError):
    """A thread did not return from its work on a request, and was replaced."""

    # A client error, as for a crash: the same request would block the next thread, and clients
    # retry a 5xx.
    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, threads: str) -> None:
        super().__init__(
            f"the {threads} thread that worked on this request did not return within its time "
            "limit (--media-decode-timeout), so the request was given up"
        )


class TooManyStuckThreadsError(MmRouterError):
    """So many threads are stuck that the process should be restarted."""


class RetryBudgetError(MmRouterError):
    """Another worker might succeed, but the retry budget is exhausted for ``wait_s`` seconds."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, cause: MmRouterError, wait_s: float) -> None:
        self.cause = cause
        self.wait_s = wait_s
        super().__init__(f"{cause}; it was not tried again, since too many requests were lately")


class EnginesDiedError(MmRouterError):
    """Several engines died with the request, at one place of its answer."""

    def __init__(self, cause: MmRouterError, count: int) -> None:
        self.cause = cause
        super().__init__(
            f"{cause}; it is engine number {count} that died with this request at the same place "
            "of its answer, so no further one gets it"
        )


class NotResumableError(MmRouterError):
    """The worker was lost after some output, and no other can resume from there."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the worker was lost after some output, which can't be continued: {reason}"
        )


class BodyError(MmRouterError):
    """A request's body is not read to its end."""

    status = HTTPStatus.BAD_REQUEST


class BodyTooLargeError(BodyError):
    """The body is larger than the operator allows."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyTooSlowError(BodyError):
    """The body did not arrive in time."""

    status = HTTPStatus.REQUEST_TIMEOUT


class BodyEncodedError(BodyError):
    """The body is compressed; frontends don't decompress."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


class RequestRejectedError(MmRouterError):
    """The request is invalid for this frontend, or for the worker's engine."""

    status = HTTPStatus.BAD_REQUEST


class EngineFailedError(MmRouterError):
    """The worker's engine failed on this request."""

    blame = "engine failed"


class EngineGoneError(EngineFailedError):
    """The worker's engine is dead; the worker can't serve any more."""

    blame = "engine died"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    may_be_deadly = True


class OperationRefusedError(MmRouterError):
    """The worker's engine refused an operation and did no part of it."""


class TransferError(MmRouterError):
    """Processed tensors could not be moved from the frontend to a worker."""

    retryable = True


class UnsupportedItemError(TransferError):
    """A processed item holds something other than tensors, lists of them and numbers."""

    retryable = False


class ArenaFullError(TransferError):
    """No memory: every evictable segment is still leased, or a worker has none for an item."""


class NoEncodedFormError(TransferError):
    """Only a medium's tensors are here, not its encoded file."""


class ArenaUnavailableError(TransferError):
    """The arena's shared memory can't be created or mapped here."""


class StaleSegmentError(TransferError):
    """The segment was reclaimed, so its bytes now belong to another item."""


class CorruptSegmentError(TransferError):
    """A segment or frame does not match its metadata."""


class TransferTimeoutError(TransferError):
    """A read missed its deadline."""


class MediaMissingError(TransferError):
    """The worker needs media items sent, each listed once; the reason is for counters."""

    def __init__(self, missing: Iterable[MmHash], reason: str) -> None:
        self.missing = list(dict.fromkeys(missing))
        self.reason = reason
        super().__init__(f"{len(self.missing)} media items are missing ({reason})")


class MediaUnavailableError(TransferError):
    """No attempt could give a media item to the engine."""

    blame = "media unavailable"
