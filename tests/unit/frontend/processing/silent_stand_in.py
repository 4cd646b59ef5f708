"""A process in the place of one that processes media, which never says that it is ready."""

import time


def main(descriptor: int) -> None:
    """Keep the connection open."""
    time.sleep(100_000)
