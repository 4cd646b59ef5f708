"""How many files this process may have open, which has to do for all clients and workers."""

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

ENOUGH: Final = 65_536
"""More is not asked for: some libraries do something for every file that could be open."""

OTHERS: Final = 1024
"""What is needed beside clients' connections: workers, fetches, shared memory, libraries."""


def attainable_files() -> int:
    """Return the highest soft limit on open files that this process can set for itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH:
        return soft
    return ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)


def files_needed(connections: int) -> int:
    """Return the open files that so many client connections need."""
    return connections + OTHERS


def raise_file_limit(connections: int) -> None:
    """Raise the soft limit as far as it goes, and warn if it is too low all the same.

    Args:
        connections: of clients, at most.
    """
    soft = attainable_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < files_needed(connections):
        logger.warning(
            "only %d files may be open (ulimit -n), too few for --max-connections=%d: lower one "
            "or raise the other",
            soft,
            connections,
        )
