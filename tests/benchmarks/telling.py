"""A line now and then while a benchmark says nothing by itself."""

import sys
from contextlib import AbstractContextManager
from functools import partial

from common.observability.log_lines import log_progress


def telling(what: str) -> AbstractContextManager[None]:
    """Say on standard error every ten seconds what is under way, and for how long."""
    return log_progress(what, partial(print, file=sys.stderr, flush=True), longest_s=10)
