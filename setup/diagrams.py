"""``python setup/diagrams.py FOLDER``: draws the project's diagrams, SVG, from its code.

- ``frontend.svg``, ``router.svg``, ``transfer.svg``: the layers of an import contract of
  pyproject.toml, each module with the first sentence of its docstring
- ``steps.svg``: the six steps of a request, from the docstrings of ``RequestRunner``
- ``lifecycle.svg``: the states of a request, from ``common/request_plane/lifecycle.py``

They follow light and dark, and load nothing. ``tests/unit/test_diagrams.py`` fails when one is old.
"""

import ast
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from common.request_plane.lifecycle import FINAL, TRANSITIONS, Event, State

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final[Mapping[str, str]] = {
    "frontend": "frontend.svg",
    "frontend.router": "router.svg",
    "common.transfer": "transfer.svg",
}
"""Containers of layers, and the diagram of each."""

_STYLE: Final = """
svg { font: 13px system-ui, sans-serif; fill: #1f2328; background: #fff; }
.box { fill: #f6f8fa; stroke: #8c959f; } .line { fill: none; stroke: #57606a; }
.name { font-family: ui-monospace, monospace; font-weight: 600; }
.head { fill: #57606a; paint-order: stroke; stroke: #fff; stroke-width: 4px; }
@media (prefers-color-scheme: dark) {
  svg { fill: #e6edf3; background: #0d1117; }
  .box { fill: #161b22; stroke: #6e7681; } .line { stroke: #8b949e; }
  .head { fill: #8b949e; stroke: #0d1117; }
}
"""
_WIDTH: Final = 900
_LINE: Final = 17
"""Pixels of a row of text."""


class Place(NamedTuple):
    """Where the middle of a state's box is."""

    x: int
    y: int


_STATES: Final[Mapping[State, Place]] = {
    State.PREPARING: Place(90, 60),
    State.CHOOSING: Place(90, 170),
    State.WAITING: Place(330, 170),
    State.STREAMING: Place(570, 170),
    State.FINISHED: Place(810, 170),
    State.MOVING: Place(330, 330),
    State.RESUMING: Place(570, 330),
    State.CANCELLED: Place(810, 30),
    State.FAILED: Place(810, 80),
}
_HALF: Final = Place(62, 17)
_LABELS: Final[Mapping[tuple[State, State], Place]] = {
    (State.WAITING, State.FINISHED): Place(570, 0),
    (State.WAITING, State.CHOOSING): Place(210, 232),
    (State.STREAMING, State.MOVING): Place(405, 248),
    (State.RESUMING, State.MOVING): Place(450, 388),
    (State.RESUMING, State.FINISHED): Place(735, 262),
}
"""Where an arrow that is no straight line turns, and its label stands."""


def diagrams() -> dict[str, str]:
    """All of them, by file name."""
    made = {name: layers(container) for container, name in FOLDERS.items()}
    return made | {"steps.svg": steps(), "lifecycle.svg": lifecycle()}


def layers(container: str) -> str:
    """The modules of a folder, those that may import others above these."""
    parts: list[str] = []
    y = 8
    for layer in _contract(container):
        names = [name.strip() for name in layer.split("|")]
        rows = [(name, textwrap.wrap(_sentence(container, name), 92)) for name in names]
        height = sum(len(lines) * _LINE + 6 for _, lines in rows) + 8
        parts.append(_box(8, y, _WIDTH - 16, height))
        line = y + 18
        for name, lines in rows:
            parts.append(_text(20, line, name, "name"))
            for text in lines:
                parts.append(_text(190, line, text))
                line += _LINE
            line += 6
        y += height + 14
    title = f"The layers of {container}: each imports only what stands below it"
    return _svg(title, y, parts)


def _contract(container: str) -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    for contract in tomllib.loads(text)["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [container]:
            return list(contract["layers"])
    raise LookupError(f"no contract has the container {container}")


def _sentence(container: str, name: str) -> str:
    """What a module says of itself."""
    path = ROOT.joinpath(*container.split("."), name)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return _first_paragraph(ast.parse(file.read_text()))


def _first_paragraph(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    said = ast.get_docstring(node) or ""
    return " ".join(said.split("\n\n")[0].replace("``", "").split())


def steps() -> str:
    """The six steps, and which of them speak with a worker."""
    parts = [_text(20, 26, "frontend", "head"), _text(_WIDTH - 130, 26, "worker", "head")]
    parts.append(_box(_WIDTH - 140, 36, 120, 6 * 64 - 12))
    y = 36
    for number, (name, says) in enumerate(_steps(), 1):
        parts.append(_box(20, y, 560, 52))
        parts.append(_text(32, y + 21, f"{number} {name}", "name"))
        for row, text in enumerate(textwrap.wrap(says, 62)[:2]):
            parts.append(_text(160, y + 21 + row * _LINE, text))
        there, back = (580, y + 26), (_WIDTH - 140, y + 26)
        if number in (4, 5):
            parts.append(_arrow(*there, *back))
        if number == 6:
            parts.append(_arrow(*back, *there))
            parts.append(_text(600, y + 18, "acks, nacks, outputs", "head"))
        y += 64
    parts.append(_text(600, 36 + 3 * 64 + 18, "media that it lacks", "head"))
    parts.append(_text(600, 36 + 4 * 64 + 18, "the request", "head"))
    parts.append(_text(20, y + 10, "If the worker is lost, steps 2 to 6 are taken again.", "head"))
    return _svg("The six steps of a request", y + 22, parts)


def _steps() -> list[tuple[str, str]]:
    """Name and sentence of each step, from its method."""
    tree = ast.parse((ROOT / "frontend/request/runner.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = _first_paragraph(node)
            if said.startswith("Step "):
                number, _, says = said.removeprefix("Step ").partition(". ")
                found[int(number)] = (node.name.strip("_").replace("_", " "), says)
    return [found[number] for number in sorted(found)]


def lifecycle() -> str:
    """The states of a request and what leads from one to another."""
    arrows: dict[tuple[State, State], list[Event]] = {}
    for (state, event), following in TRANSITIONS.items():
        if event not in (Event.ERROR, Event.CANCEL):
            arrows.setdefault((state, following), []).append(event)
    # Labels over lines, not under them.
    parts = sorted(
        (part for ends, events in arrows.items() for part in _transition(*ends, events)),
        key=lambda part: part.startswith("<text"),
    )
    for state, at in _STATES.items():
        box = _box(at.x - _HALF.x, at.y - _HALF.y, 2 * _HALF.x, 2 * _HALF.y, state in FINAL)
        parts += [box, _text(at.x, at.y + 5, state, "name", middle=True)]
    note = "An error leads from every state that is not final to failed, a cancel to cancelled."
    parts.append(_text(28, 425, note, "head"))
    return _svg("The life of a request", 440, parts)


def _transition(state: State, following: State, events: list[Event]) -> Iterator[str]:
    a, b = _STATES[state], _STATES[following]
    label = ", ".join(events)
    if state is following:
        side = -1 if state in (State.WAITING, State.STREAMING) else 1
        y = a.y + side * _HALF.y
        points = f"M{a.x - 40},{y} C{a.x - 40},{y + side * 34} {a.x + 10},{y + side * 34} {a.x},{y}"
        yield _path(points)
        yield _text(a.x - 20, y + side * 40 + (0 if side < 0 else 4), label, "head", middle=True)
        return
    turn = _LABELS.get((state, following))
    if turn is not None:
        yield _path(f"M{_edge(a, turn)} Q{turn.x},{turn.y} {_edge(b, turn)}")
        middle = Place((a.x + 2 * turn.x + b.x) // 4, (a.y + 2 * turn.y + b.y) // 4)
    else:
        yield _path(f"M{_edge(a, b)} L{_edge(b, a)}")
        middle = Place((a.x + b.x) // 2, (a.y + b.y) // 2)
    yield _text(middle.x, middle.y + (4 if turn or a.x == b.x else -6), label, "head", middle=True)


def _edge(of: Place, towards: Place) -> str:
    """The point where a line from the middle of a box leaves it."""
    x, y = towards.x - of.x, towards.y - of.y
    scale = min(_HALF.x / abs(x) if x else 99, _HALF.y / abs(y) if y else 99)
    return f"{of.x + x * scale:.0f},{of.y + y * scale:.0f}"


def _svg(title: str, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">'
    )
    marker = (
        '<marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path class="line" d="M1,1 L8,4 L1,7"/></marker>'
    )
    made = f"<title>{escape(title)}</title><style>{_STYLE}</style><defs>{marker}</defs>"
    comment = "<!-- Made by `make docs` from the code: change setup/diagrams.py. -->"
    return "\n".join([head, comment, made, *parts, "</svg>", ""])


def _box(x: int, y: int, width: int, height: int, final: bool = False) -> str:
    double = ' stroke-width="2.5"' if final else ""
    return f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"{double}/>'


def _text(x: int, y: int, text: str, kind: str = "", *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{kind}{anchor}>{escape(text)}</text>'


def _path(points: str) -> str:
    return f'<path class="line" d="{points}" marker-end="url(#tip)"/>'


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return _path(f"M{x1},{y1} L{x2},{y2}")


def main() -> None:
    """Write all of them into the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, drawn in diagrams().items():
        (folder / name).write_text(drawn)


if __name__ == "__main__":
    main()
