"""What can go wrong with processing, beside media that are no good."""

from http import HTTPStatus

from common.errors import MmRouterError


class ProcessingFailedError(MmRouterError):
    """A medium could not be processed, through no fault that could be named to the user."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class NoPlaceError(MmRouterError):
    """The prompt has nothing that could make way for one of its media."""

    status = HTTPStatus.BAD_REQUEST


class ProcessLostError(MmRouterError):
    """A process that processes media ended by itself."""


class ProcessHungError(MmRouterError):
    """A process that processes media did not answer in time and was killed."""


class AbandonedError(MmRouterError):
    """Work was left undone because everybody who wanted it had gone."""


class OutlineError(MmRouterError):
    """A picture is not what its outline said, so its prompt is wrong."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
