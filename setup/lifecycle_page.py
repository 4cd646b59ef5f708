"""``python setup/lifecycle_page.py FILE``: writes the page on the life of a request."""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.request_plane.lifecycle import TRANSITIONS, Event, State

MEANING: dict[State | Event, str] = {
    State.PREPARING: "the frontend renders, processes and validates the prompt",
    State.CHOOSING: "nothing was answered; the frontend chooses a worker and sends it media",
    State.WAITING: "a worker has the request; nothing was answered",
    State.STREAMING: "outputs come",
    State.MOVING: "the worker was lost after some output; the frontend chooses another, or waits "
    "for one to come",
    State.RESUMING: "another worker has the request; none of its output came yet",
    State.FINISHED: "the last output was given to the user",
    State.FAILED: "the user got an error, as a status or as an event of the stream",
    State.CANCELLED: "the user left, or the frontend shuts down; the worker is told to stop",
    Event.PREPARED: "the prompt is valid and its media are at hand",
    Event.DISPATCHED: "the request was sent to the chosen worker",
    Event.NACK: "the worker lacks media; the frontend supplies them",
    Event.ACK: "the worker's engine has the media; what was leased is free again",
    Event.OUTPUT: "tokens and text",
    Event.LAST_OUTPUT: "tokens and text, and the reason why there are no more",
    Event.WORKER_FAILED: "the worker died, fell silent, stalled or gave up, and another may try",
    Event.ERROR: "the request can't go on: it is invalid, late, or nobody can take it",
    Event.CANCEL: "nobody wants the answer any more",
}

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
