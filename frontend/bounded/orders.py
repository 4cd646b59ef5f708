"""Messages and limits of the processes that try structures and render templates."""

from typing import Any, Final, NamedTuple

from frontend.bounded.forks import Bounds

STRUCTURE_BOUNDS: Final = Bounds(cpu_s=10, memory_bytes=1 << 30, alarm_s=60)
"""For one structure. With 130,000 tokens a schema with ``maxLength: 500`` takes 5 s of a core, 128
tools of 6 parameters 0.2 s."""

THREADS: Final = 4
"""Threads that compile one structure; engines have 8."""

STEPS: Final = 64
"""Tokens of an answer that are tried."""

STEP_S: Final = 0.1
"""CPU seconds for the mask of one token, which an engine makes between two steps of all its
requests. With 130,000 tokens, schemas of 300 optional fields take 6 ms, ``.{1,500}`` 40 ms."""

COMPILES: Final = b"+"
"""The backend takes the structure, within the limits; CPU seconds of its slowest mask follow."""

REFUSED: Final = b"-"
"""A backend refuses the structure, at no cost; or a template raised an error, which follows."""

READ_S: Final = 0.5
"""CPU seconds to read a structure, by whichever compiler. vLLM reads it in a frontend's one
tokenizer thread, and on the event loop of a worker: a ``pattern`` of 46 bytes took 3 s in each.
128 tools of 6 parameters take 0.02 s, ``.{1,500}`` as well."""

READ_BYTES: Final = 128 << 20
"""Memory to read a structure, in the same two places: an array of 6 million items, in 60 bytes,
took 0.5 GB of each. Structures of 128 tools take 8 MB, choices between 20,000 texts 28 MB."""

OK: Final = b"+"
"""The template was rendered; the prompt, or the format of contents, follows."""

MAX_REASON: Final = 1024
"""Bytes of a template's error."""

MAX_TEXT: Final = 64 << 20
"""Bytes of a prompt, which the frontend keeps."""

TEMPLATE_BOUNDS: Final = Bounds(cpu_s=2, memory_bytes=256 << 20, alarm_s=10)
"""For one template; those of models take milliseconds."""


class Vocabulary(NamedTuple):
    """First message to the process that tries structures.

    Attributes:
        backend: of engines: ``auto``, ``xgrammar``, ``guidance`` or ``outlines``.
        info: xgrammar's ``TokenizerInfo``, as JSON; empty if the backend is not xgrammar.
        outlines: ``outlines_core.Vocabulary``; None if the backend is not outlines.
        compact: whether no white space may stand between the parts of JSON.
    """

    backend: str
    info: str
    outlines: object
    compact: bool
    bounds: Bounds


class Structure(NamedTuple):
    """A structure of kind ``json``, ``regex``, ``grammar``, ``lark`` or ``structural_tag``."""

    kind: str
    text: str


class Order(NamedTuple):
    """A template to render.

    Attributes:
        conversation: as vLLM has parsed it; None to ask only for the format of its contents.
        options: of ``apply_chat_template`` and of the template.
        tokens: the tokenizer's special ones, which are variables of each template.
    """

    template: str
    conversation: list[Any] | None
    options: dict[str, Any]
    tokens: dict[str, Any]
