"""``python -m common.lifecycle_page FILE``: writes the page on the life of a request."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from common.lifecycle import FINAL, MEANING, TRANSITIONS, Event, State

_EVERYWHERE = (Event.ERROR, Event.CANCEL)
"""They lead out of every state that is not final, which would only clutter a diagram."""

_TEXT = """\
<!-- Made by `make docs` from common/lifecycle.py: change that. -->
# The life of a request

As the frontend sees it. `common/lifecycle.py` holds it as one table, which the frontend follows
while it serves: what stands nowhere in the table is an error that names state and event.
[Faults](faults.md) says what happens when a worker is lost.

```mermaid
{diagram}
```

An `error` leads from every state that is not final to `failed`, a `cancel` to `cancelled`.

## States

{states}

## Events

{events}

## Transitions

{transitions}
"""


def page() -> str:
    """The page, with a diagram that Mermaid draws."""
    return _TEXT.format(
        diagram=diagram(),
        states=_table(("state", ""), ((state, MEANING[state]) for state in State)),
        events=_table(("event", ""), ((event, MEANING[event]) for event in Event)),
        transitions=_table(
            ("in state", "on", "to"),
            ((state, event, to) for (state, event), to in TRANSITIONS.items()),
        ),
    )


def diagram() -> str:
    """The transitions as a state diagram of Mermaid's, parallel ones on one arrow."""
    arrows: defaultdict[tuple[State, State], list[Event]] = defaultdict(list)
    for (state, event), following in TRANSITIONS.items():
        if event not in _EVERYWHERE:
            arrows[state, following].append(event)
    lines = ["stateDiagram-v2", f"    [*] --> {State.PREPARING}"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in State if state in FINAL]
    return "\n".join(lines)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
