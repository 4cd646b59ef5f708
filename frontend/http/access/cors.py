"""The headers by which a browser lets a page read an answer (``--allowed-origins`` and the like).

They stand on every answer. vLLM's app would set them on its own only, so a page would be told
"failed to fetch" where a 429 says when to come back.
"""

from argparse import Namespace
from typing import Final

from starlette.middleware.cors import CORSMiddleware

from frontend.asgi import App

EXPOSED: Final = ("Retry-After", "X-Request-Id")
"""Headers of answers that pages may read beside the usual ones."""


class Cors(CORSMiddleware):
    """ASGI middleware outside of all others, which answers preflights itself."""

    def __init__(self, app: App, args: Namespace) -> None:
        """
        Args:
            args: vLLM's API server arguments.
        """
        super().__init__(
            app,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            expose_headers=EXPOSED,
        )

    def of_refusal(self, origin: str | None) -> dict[str, str]:
        """Return the headers of an answer that is given before a request is there as a whole.

        Args:
            origin: of the page that asks, None if that is not known (yet).
        """
        if self.allow_all_origins and not self.allow_credentials:
            return self.simple_headers
        if origin is None or not self.is_allowed_origin(origin):
            return {}
        return self.simple_headers | {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
