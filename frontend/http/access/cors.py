"""CORS headers (``--allowed-origins`` and the like), on every answer.

vLLM's app would set them only on its own answers: a page would see "failed to fetch" where a 429
tells when to retry.
"""

from argparse import Namespace
from typing import Final

from starlette.middleware.cors import CORSMiddleware

from frontend.asgi import App

EXPOSED: Final = ("Retry-After", "X-Request-Id")
"""Headers that pages may read beside the usual ones."""


class Cors(CORSMiddleware):
    """ASGI middleware outside of all others; answers preflights itself."""

    def __init__(self, app: App, args: Namespace) -> None:
        super().__init__(
            app,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            expose_headers=EXPOSED,
        )

    def of_refusal(self, origin: str | None) -> dict[str, str]:
        """Return the headers of an early rejection, whose ``origin`` may not be known yet."""
        if self.allow_all_origins and not self.allow_credentials:
            return self.simple_headers
        if origin is None or not self.is_allowed_origin(origin):
            return {}
        return self.simple_headers | {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
