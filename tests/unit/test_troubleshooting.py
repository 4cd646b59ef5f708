"""The log lines, metrics and flags that the page quotes are those of the code."""

import ast
import errno
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [
    line
    for block in re.findall(r"^```log\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.split("\n")
]
QUOTED = [line for line in QUOTED if line]


STRERRORS = {os.strerror(number) for number in errno.errorcode}


@cache
def messages() -> list[tuple[str, re.Pattern[str]]]:
    """All texts of the source that could be a line, with anything where values stand, and the
    longest piece of each, since looking for that is quicker.
    """
    found = set()
    for folder in ("backend_worker", "common", "frontend"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                    parts = list(_parts(node))
                    texts = [part.strip() for part in parts if part]
                    # "worker %s: %s" would be too many lines.
                    if any(len(text) > 6 for text in texts) or len("".join(texts)) > 12:
                        line = "".join("(.+?)" if p is None else re.escape(p) for p in parts)
                        found.add((max(filter(None, parts), key=len), line))
    return [(piece, re.compile(line)) for piece, line in sorted(found)]


def is_said(line: str, *, value: bool = False) -> bool:
    """Whether the source can say this. A value is any word or two, or what the source says."""
    line = re.sub(r"^\[Errno \d+\] ", "", line)
    if line in STRERRORS or (value and len(line.split()) <= 2):
        return True
    found = (each.fullmatch(line) for piece, each in messages() if piece in line)
    return any(match and all(is_said(one, value=True) for one in match.groups()) for match in found)


def _parts(node: ast.expr) -> Iterator[str | None]:
    """Text, and None where a value stands."""
    match node:
        case ast.Constant(value=str(text)):
            for part in re.split(r"(%[-.\d]*[sdrgfx])", text):
                yield None if re.fullmatch(r"%[-.\d]*[sdrgfx]", part) else part
        case ast.JoinedStr(values=values):
            for value in values:
                yield from _parts(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _parts(left)
            yield from _parts(right)
        case _:
            yield None


def test_something_is_quoted() -> None:
    assert len(QUOTED) > 30


def test_each_line_is_one_of_the_source() -> None:
    assert [line for line in QUOTED if not is_said(line)] == []


def test_a_line_of_nobody_is_found_out() -> None:
    assert not is_said("worker w0: the coffee is cold")
    assert not is_said("shared memory is unavailable (the coffee is cold)")


def test_metrics_and_flags_are_there() -> None:
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    settings = (ROOT / "docs" / "settings.md").read_text()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/*.md")):
        for name in re.findall(r"\bmmrouter_[a-z_]*[a-z]\b", page.read_text()):
            assert f"`{name.removesuffix('_bucket')}`" in metrics, f"{page}: {name}"
    ours = set(re.findall(r"`(--[a-z][a-z-]+)`", PAGE)) - {"--kv-events-config", "--shm-size"}
    for flag in ours:
        assert re.search(rf"`{flag}\b|{flag} ", settings), flag
