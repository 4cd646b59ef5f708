"""What a frontend asks of the process that renders clients' chat templates, and its limits."""

from typing import Any, Final, NamedTuple

CPU_S: Final = 2
"""Seconds of a core for one template. Templates of models take milliseconds."""

MEMORY_BYTES: Final = 256 << 20
"""What one template may take beside what this process has."""

MAX_TEXT: Final = 64 << 20
"""Bytes of a prompt; the frontend keeps it."""

MAX_REASON: Final = 1024
"""Bytes of what a template raises."""

ALARM_S: Final = 10
"""Seconds on the clock, on a host whose cores are busy."""


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
