"""Prometheus's text format: parse the pages of other processes strictly, and merge them.

A malformed page is dropped as a whole, so one worker can't keep a scraper from reading the rest.
The parser of ``prometheus_client`` takes about five times as long a line, and can't pause between
two.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from typing import Final

TEXT_FORMAT: Final = "text/plain; version=0.0.4; charset=utf-8"

MAX_LINE_LEN: Final = 16 << 10
"""Bytes. Parsing a line takes well below a millisecond."""

_LINES: Final = 100
"""Lines parsed at a time: about half a millisecond."""

_PAUSE_S: Final = 0.001
"""Seconds left to the event loop in between. A thread would hold the GIL for longer."""

_PIECE: Final = 1000
"""Samples joined at a time: some 150 kB, in a fraction of a millisecond."""

_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL: Final = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\["\\n])*"'
_VALUE: Final = r"[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|Inf|NaN)"
_SAMPLE: Final = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? ({_VALUE})")
_EACH_LABEL: Final = re.compile(r'([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"')
_HELP: Final = re.compile(rf"# HELP ({_NAME}) (.*)", re.DOTALL)
_TYPE: Final = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)")
_SUFFIXES: Final = ("", "_bucket", "_sum", "_count")
_OPEN: Final = "untyped"
"""Type of a metric on which pages disagree."""


class ExpositionError(Exception):
    """A page is malformed. The message names the line."""


@dataclass
class Family:
    """A metric; ``samples`` are lines with the added label."""

    type: str
    documentation: str = ""
    samples: list[str] = field(default_factory=list)


class PageReader:
    """Parse a page in batches; set one label on each sample, replacing the page's own."""

    def __init__(self, page: bytes, label: str, value: str) -> None:
        self.families: dict[str, Family] = {}
        self._lines = BytesIO(page)
        self._number = 0
        self._label = label
        self._added = f'{label}="{escaped(value)}"'
        self._documentation: dict[str, str] = {}
        self._labels: dict[str, str] = {}  # cached: label sets repeat
        self._name = ""

    def read(self, lines: int) -> bool:
        """Parse some lines; return whether there are more. Raises ExpositionError."""
        read = 0
        for line in islice(iter(lambda: self._lines.readline(MAX_LINE_LEN + 1), b""), lines):
            read += 1
            self._number += 1
            if len(line) > MAX_LINE_LEN:
                raise self._error("is too long")
            try:
                self._read(line.decode().removesuffix("\n"))
            except UnicodeDecodeError as error:
                raise self._error("is not UTF-8") from error
        return read == lines

    def _read(self, line: str) -> None:
        if described := _HELP.fullmatch(line):
            self._documentation[described[1]] = described[2]
        elif typed := _TYPE.fullmatch(line):
            self._name = typed[1]
            if self._name in self.families:
                raise self._error("describes a metric again")
            documentation = self._documentation.get(self._name, "")
            self.families[self._name] = Family(typed[2], documentation)
        elif sample := _SAMPLE.fullmatch(line):
            name, labels, value = sample[1], sample[2] or "", sample[3]
            family = self.families.get(self._name)
            if family is None or name not in {self._name + each for each in _SUFFIXES}:
                raise self._error("is of no metric that was described")
            if labels not in self._labels:
                self._labels[labels] = "".join((self._added, *self._others(labels)))
            family.samples.append(f"{name}{{{self._labels[labels]}}} {value}\n")
        elif line:
            raise self._error("is neither a sample nor a description")

    def _others(self, labels: str) -> Iterator[str]:
        """Yield the labels except the added one."""
        names = set()
        for name, value in _EACH_LABEL.findall(labels):
            if name in names or name.startswith("__"):
                raise self._error("has a label twice, or one that is reserved")
            names.add(name)
            if name != self._label:
                yield f',{name}="{value}"'

    def _error(self, what: str) -> ExpositionError:
        return ExpositionError(f"line {self._number} {what}")


class Joined:
    """Metrics of several pages, merged into one."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, families: dict[str, Family]) -> None:
        """Add the metrics of a page. A metric on whose type pages disagree becomes untyped."""
        for name, family in families.items():
            there = self._families.setdefault(name, family)
            if there is not family:
                there.samples += family.samples
                if there.type != family.type:
                    there.type = _OPEN

    def __iter__(self) -> Iterator[bytes]:
        """Yield the page in pieces."""
        for name, family in self._families.items():
            if family.documentation:
                yield f"# HELP {name} {family.documentation}\n".encode()
            yield f"# TYPE {name} {family.type}\n".encode()
            samples = iter(family.samples)
            while piece := "".join(islice(samples, _PIECE)):
                yield piece.encode()


async def read_page(page: bytes, label: str, value: str, into: Joined) -> None:
    """Add a page, yielding to other tasks. Raises ExpositionError and adds nothing if malformed."""
    reader = PageReader(page, label, value)
    while reader.read(_LINES):  # noqa: ASYNC110  # it is work, and no condition
        await asyncio.sleep(_PAUSE_S)
    into.add(reader.families)


def escaped(value: str) -> str:
    """Escape the value of a label, as between quotes."""
    plain = value.encode(errors="replace").decode()
    return plain.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
