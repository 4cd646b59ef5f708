"""What SIGTERM and SIGINT ask of a process, on either side of the request plane.

SIGTERM asks it to finish what it has. SIGINT comes from a person at the keyboard, who
wants it to end now, and so does whoever sends a second signal of either kind.
"""

import asyncio
import signal


class StopSignals:
    """Listens from its creation on, on the running event loop."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.terminate)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)

    def terminate(self) -> None:
        """What SIGTERM does."""
        if self._asked.is_set():
            self._at_once.set()
        self._asked.set()

    def interrupt(self) -> None:
        """What SIGINT does."""
        self._asked.set()
        self._at_once.set()

    @property
    def is_asked(self) -> bool:
        """Whether the process was asked to end."""
        return self._asked.is_set()

    async def asked(self) -> None:
        """Wait until the process is asked to end in either way."""
        await self._asked.wait()

    async def at_once(self, timeout: float | None = None) -> bool:
        """Wait until it is to end at once.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether it was asked to; False after the time-out.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._at_once.wait()
        except TimeoutError:
            return False
        return True
