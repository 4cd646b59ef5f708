"""What a stream is about, and what follows from it: how far the index can be trusted
and whether its blocks may be routed on."""

from enum import Enum

from frontend.router.events.progress import Blocks, Progress
from frontend.router.events.watch import Watch
from frontend.router.index import EXACT, IndexState, approximate, degraded


class Phase(Enum):
    """What a stream is about."""

    FOLLOWING = "live events are applied as they come"
    REPAIRING = "a replay is under way, blocks are suspended, live events wait"
    CHECKING = "a replay is under way to make sure, live events wait"
    UNAIDED = "no replay is to be had: live events alone"


class Standing:
    """Where a stream stands.

    Args:
        blocks: suspended and resumed as the phase and the connection want it.
        progress, watch: of the stream; what they know shows in :attr:`state`.
    """

    def __init__(self, blocks: Blocks, progress: Progress, watch: Watch) -> None:
        self._blocks = blocks
        self._progress = progress
        self._watch = watch
        self._cause = ""
        self._connected = False
        self._was_connected = False
        self._closed = False
        self.phase = Phase.UNAIDED

    def enter(self, phase: Phase, cause: str = "") -> None:
        """Go into a phase, or stay in it.

        Args:
            cause: why a replay is under way, or why there is none.
        """
        self.phase = phase
        self._cause = cause
        self._show()

    def connect(self) -> bool:
        """The live connection was made. Whether it is not the first."""
        again, self._was_connected = self._was_connected, True
        self._connected = True
        self._show()
        return again

    def disconnect(self) -> None:
        """The live connection broke."""
        self._connected = False
        self._show()

    def close(self) -> None:
        """The worker's incarnation is gone."""
        self._closed = True

    def ignores(self) -> bool:
        """Whether nothing that arrives is of any use."""
        return self._closed or bool(self._blocks.unusable)

    @property
    def state(self) -> IndexState:
        """How far the index can be trusted at this moment."""
        unknown = self._progress.unknown
        if self._closed:
            return approximate("the worker is gone")
        if self._blocks.unusable:
            return approximate(self._blocks.unusable)
        if self.phase is Phase.REPAIRING:
            return degraded(f"replay under way: {self._cause}; {self._progress.so_far}")
        if self.phase is Phase.UNAIDED and unknown and not self._progress.heard:
            return approximate("; ".join(dict.fromkeys((self._cause, unknown))))
        if not self._connected:
            return degraded("no connection to its event endpoint")
        if unknown:
            return degraded(f"blocks stored earlier are unknown: {unknown}")
        if self._watch.mute:
            return degraded("it serves requests but publishes no events")
        if self._blocks.unmodelled:
            return degraded(self._blocks.unmodelled)
        return EXACT

    def _show(self) -> None:
        """Let blocks be routed on if nothing is known to be missing."""
        if self._connected and self.phase is not Phase.REPAIRING:
            self._blocks.resume()
        else:
            self._blocks.suspend()
