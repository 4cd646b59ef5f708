"""uvicorn's server, but for signals."""

import contextlib
from collections.abc import Iterator

import uvicorn


class Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again before we have cleaned up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing; the process has its own handlers."""
        yield
