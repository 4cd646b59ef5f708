"""How the frontend fetches media, registered with vLLM under the name ``mmrouter``.

vLLM answers 500 when a host is unreachable or a local file is asked for; it is the
request that names them, so here the user gets a 422 that says what is wrong and
nothing about our insides.
"""

from typing import TypeVar

import aiohttp
from PIL import Image
from urllib3.util import parse_url
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaIO

CONNECTOR_NAME = "mmrouter"

M = TypeVar("M")


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)
class FrontendMediaConnector(MediaConnector):
    """vLLM's connector, with errors a user can act on."""

    async def load_from_url_async(
        self, url: str, media_io: MediaIO[M], *, fetch_timeout: int | None = None
    ) -> M:
        """Fetch and decode one media item.

        Raises:
            VLLMUnprocessableEntityError: it can't be fetched; 422.
            VLLMValidationError, ValueError: it can't be decoded, is too large, or its
                URL makes no sense; 400.
        """
        try:
            loaded: M = await super().load_from_url_async(
                url, media_io, fetch_timeout=fetch_timeout
            )
        except aiohttp.ClientResponseError as error:
            raise _unfetchable(url, f"the server answered {error.status}") from error
        except TimeoutError as error:
            raise _unfetchable(url, "the server did not answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _unfetchable(url, "the server can't be reached") from error
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise _unfetchable(url, "there is no such file") from error
        except (NotImplementedError, Image.DecompressionBombError) as error:
            raise VLLMValidationError(str(error)) from error
        except RuntimeError as error:
            if not url.lower().startswith("file:"):
                raise
            raise _unfetchable(url, str(error)) from error  # local files are not allowed
        return loaded


def _unfetchable(url: str, reason: str) -> VLLMUnprocessableEntityError:
    parsed = parse_url(url)
    # Without user information and query: they may hold secrets, and this is logged.
    where = f"{parsed.scheme}://{parsed.hostname or ''}"
    where += f":{parsed.port}" if parsed.port else ""
    return VLLMUnprocessableEntityError(
        f"Failed to fetch media from {where}{parsed.path or ''}: {reason}"
    )
