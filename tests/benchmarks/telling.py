"""A line now and then while a benchmark says nothing by itself."""

import sys
from contextlib import AbstractContextManager
from functools import partial

from common.observability.still_busy import still_busy


def telling(what: str) -> AbstractContextManager[None]:
    """Say on standard error every ten seconds what is under way, and for how long."""
    return still_busy(what, partial(print, file=sys.stderr, flush=True), longest_s=10)
