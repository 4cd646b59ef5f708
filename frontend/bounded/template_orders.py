"""What a frontend asks of the process that renders clients' chat templates, and its limits."""

from typing import Any, Final, NamedTuple

from frontend.bounded.forks import Bounds

BOUNDS: Final = Bounds(cpu_s=2, memory_bytes=256 << 20, alarm_s=10)
"""For one template. Templates of models take milliseconds."""

MAX_TEXT: Final = 64 << 20
"""Bytes of a prompt; the frontend keeps it."""

MAX_REASON: Final = 1024
"""Bytes of what a template raises."""


class Order(NamedTuple):
    """What is to be rendered.

    Attributes:
        conversation: as vLLM has parsed it; None if only the format of its contents is asked for.
        options: of ``apply_chat_template`` and of the template.
        tokens: the tokenizer's special ones, which are variables of each template.
    """

    template: str
    conversation: list[Any] | None
    options: dict[str, Any]
    tokens: dict[str, Any]


OK: Final = b"+"
REFUSED: Final = b"-"
