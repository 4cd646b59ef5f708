"""What a watched frontend says of itself when it is asked."""

import msgspec


class Report(msgspec.Struct):
    """Of one frontend.

    Attributes:
        tasks: of its event loop.
        lost: messages of KV events that were lost on purpose.
        threads: by name, without the numbers that pools give them.
        sockets: of ZeroMQ, by type; each has an eventfd, and so has libzmq's end of a monitor.
    """

    tasks: int
    lost: int
    threads: dict[str, int]
    sockets: dict[str, int]
