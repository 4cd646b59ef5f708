"""What a process does when the frontend that it works for is gone."""

import os
import select
import threading


def end_with(frontend: int) -> None:
    """Have this process end when the frontend does, also in the middle of a batch that hangs.

    Not by ``PR_SET_PDEATHSIG``, which goes by the thread that started this process, nor by its
    parent, which is a fork server.

    Args:
        frontend: its pidfd.
    """

    def wait() -> None:
        select.select([frontend], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="frontend", daemon=True).start()
