"""Environment variables that look like settings of ours and are none.

They are warned of and not refused, unlike flags: one environment is often handed to frontends and
workers alike, and Kubernetes puts ``MMROUTER_PORT`` and the like into Pods beside a Service called
``mmrouter``. For the same reason one that resembles no setting is passed over.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from common.flag_settings import ENV_PREFIX, FlagSettings

_ALIKE: Final = 0.85
"""How much of a name must be the same: a letter too few, or two in the wrong order."""

_OF_KUBERNETES: Final = re.compile(r"(tcp|udp|sctp)://")


def stray_variables(
    groups: Iterable[type[FlagSettings]],
    vllms: Callable[[str], bool],
    environ: Mapping[str, str],
) -> list[str]:
    """A sentence for each that somebody may have meant for this process. No value is shown.

    Args:
        groups: settings of this process.
        vllms: whether a flag is one of vLLM's that this process takes.
    """
    known = {group.variable(name) for group in groups for name in group.declared()}
    found = []
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in known or not value:
            continue
        flag = "--" + name.removeprefix(ENV_PREFIX).lower().replace("_", "-")
        if vllms(flag):
            if not _OF_KUBERNETES.match(value):
                found.append(f"{name} does nothing: {flag} is vLLM's and has no variable here")
        elif near := _nearest(name, known):
            found.append(f"{name} does nothing; did you mean {near}?")
    return found


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Compared without what they all begin with, which would make any two alike."""
    rests = {one.removeprefix(ENV_PREFIX): one for one in known}
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), rests, n=1, cutoff=_ALIKE)
    return rests[near[0]] if near else None
