"""What a watched frontend says of itself when it is asked."""

import msgspec


class Report(msgspec.Struct):
    """Of one frontend.

    Attributes:
        tasks: of its event loop.
        lost: messages of KV events that were lost on purpose.
        threads: by name, without the numbers that pools give them.
    """

    tasks: int
    lost: int
    threads: dict[str, int]
