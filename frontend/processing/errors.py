"""Errors of processing, besides unusable media."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, Self

from common.errors import MmRouterError, causes
from frontend.media_limits import RefusedError

_VLLMS: Final = "Failed to apply "
"""Prefix of vLLM's error for an exception in a Hugging Face processor: it has all arguments, but
not the reason."""

_MAX_REASON: Final = 300


class ProcessingFailedError(MmRouterError):
    """Processing failed without a cause to report to the user."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY

    @classmethod
    def about(cls, said: str) -> Self:
        """Quote a library's error to a client, without the exception's name."""
        said = said or "the model's processor can't take it"
        return cls(f"a medium could not be processed: {said}")


class MediumTooCostlyError(MmRouterError):
    """A medium takes far more memory than its size and pixels justify."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, medium: str) -> None:
        super().__init__(
            f"{medium} could not be processed: it takes far more memory than one of its size and "
            "pixels needs. Send it in another format, or smaller"
        )


class MissingPackageError(MmRouterError):
    """A medium needs a Python package that is not installed."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE

    def __init__(self, package: str) -> None:
        super().__init__(
            f"this frontend can't process the medium: the Python package {package} is not "
            "installed. Its administrator can install it, and `mmrouter doctor` says "
            "what else is missing"
        )


def missing_package(error: BaseException) -> str | None:
    """Return the package whose absence caused an error, None for other causes."""
    # vLLM's placeholder looks up vLLM's metadata, which may fail too: the root cause counts.
    missing = [each.name for each in causes(error) if isinstance(each, ModuleNotFoundError)]
    return missing[-1] if missing else None


class NoPlaceError(MmRouterError):
    """The prompt has no placeholder for one of its media."""

    status = HTTPStatus.BAD_REQUEST


class AbandonedError(MmRouterError):
    """Work was skipped because no request waits for it any more."""


@contextmanager
def said_by_processor() -> Iterator[None]:
    """Raise RefusedError with a Hugging Face processor's own reason, which vLLM leaves out."""
    try:
        yield
    except ValueError as error:
        for each in causes(error):
            if isinstance(each, RefusedError):
                raise each from None
        if not str(error).startswith(_VLLMS) or error.__cause__ is None:
            raise
        cause = error.__cause__
        said = str(cause).strip().partition("\n")[0][:_MAX_REASON] or type(cause).__name__
        raise RefusedError(f"the model's processor refuses it: {said}") from error
