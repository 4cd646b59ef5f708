"""What a process does when the one that started it is gone."""

import os
import select
import threading


def end_with_parent() -> None:
    """Have this process end when its parent does, also in the middle of a batch that hangs.

    Not by ``PR_SET_PDEATHSIG``, which goes by the thread that started this process.
    """
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([parent], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
