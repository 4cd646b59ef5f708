"""``python setup/lifecycle_page.py FILE``: writes the page on the life of a request."""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.request_plane.lifecycle import MEANING, TRANSITIONS, Event, State

_TEXT = """\
<!-- Made by `make docs` from common/request_plane/lifecycle.py: change that. -->
# The life of a request

As the frontend sees it. `common/request_plane/lifecycle.py` holds it as one table, which the
frontend follows while it serves: what stands nowhere in the table is an error that names state and
event.
[Faults](faults.md) says what happens when a worker is lost.

![The states of a request and what leads from one to another](diagrams/lifecycle.svg)

## States

{states}

## Events

{events}

## Transitions

{transitions}
"""


def page() -> str:
    """The page; its diagram is drawn by setup/diagrams.py."""
    return _TEXT.format(
        states=_table(("state", ""), ((state, MEANING[state]) for state in State)),
        events=_table(("event", ""), ((event, MEANING[event]) for event in Event)),
        transitions=_table(
            ("in state", "on", "to"),
            ((state, event, to) for (state, event), to in TRANSITIONS.items()),
        ),
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
