"""What a frontend asks of the process that tries clients' structures, and its limits."""

from typing import Final, NamedTuple

from frontend.bounded.forks import Bounds

BOUNDS: Final = Bounds(cpu_s=10, memory_bytes=1 << 30, alarm_s=60)
"""For one structure. With 130,000 tokens a schema with ``maxLength: 500`` takes 5 s of a core, 128
tools of 6 parameters 0.2 s."""

THREADS: Final = 4
"""That compile one structure; engines have 8."""

STEPS: Final = 64
"""Tokens of an answer that are tried."""

STEP_S: Final = 0.1
"""Seconds of a core for the mask of one token, which an engine makes between two steps of all its
requests. With 130,000 tokens, schemas of 128 tools or of 300
optional fields take 7 ms."""

COMPILES: Final = b"+"

REFUSED: Final = b"-"
"""The backend refuses the structure, at no cost."""

READ_S: Final = 1.0
"""Seconds of a core to read a structure for guidance or outlines. vLLM reads it in the one thread
of a frontend in which prompts become tokens, and on the event loop of a worker."""


class Vocabulary(NamedTuple):
    """What the process is sent first.

    Attributes:
        backend: of engines: ``auto``, ``xgrammar``, ``guidance`` or ``outlines``.
        info: xgrammar's ``TokenizerInfo``, as JSON; empty if the backend is not xgrammar.
        outlines: ``outlines_core.Vocabulary``; None if the backend is not outlines.
        compact: whether no white space may stand between the parts of JSON.
        bounds: of each trial.
    """

    backend: str
    info: str
    outlines: object
    compact: bool
    bounds: Bounds


class Structure(NamedTuple):
    """A structure of an answer.

    Attributes:
        kind: ``json``, ``regex``, ``grammar``, ``lark`` or ``structural_tag``.
    """

    kind: str
    text: str
