"""Our errors as vLLM's, so that its server answers with their status and sentence."""

from http import HTTPStatus

from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMError, VLLMValidationError

from common.errors import MmRouterError


def as_vllm_error(error: MmRouterError) -> VLLMError:
    """The error of vLLM's that its server answers with the status of ours."""
    if error.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        return VLLMValidationError(str(error))
    if error.status is HTTPStatus.INTERNAL_SERVER_ERROR:
        return GenerationError(str(error))
    return GracefulHTTPError(str(error), error.status)
