"""Find what makes the masks of a structure slow wherever an answer gets: runs of optional parts.

A trial sees the first tokens of an answer only. Behind a thousand letters, or in a branch that it
did not take, 6 KB of ``(a*)*`` took an engine 20 s for each token.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_RUN: Final = 128
"""Parts of a sequence, one behind the other, that may all be empty. The time for a mask grows with
their cube: 0.04 s for 128 of ``(a*)*`` and a vocabulary of 130,000, and 20 s for 1,000. Runs within
repetitions, alternatives or other runs add up to no more: 4 ms for 7,000 parts."""

_TOKEN: Final = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # text
    r"|\[(?:[^\]\\]|\\.)*\]\*?"  # one of some characters, or any number of these
    r"|\w+(?:\{\d+, -?\d+\})?"  # a rule, perhaps repeated, from some to so many times
    r"|[()|]"
)


class _Part(NamedTuple):
    """A part of a sequence: text, characters, or a ``rule``. It may be empty if the rule may."""

    rule: str = ""
    may_be_empty: bool = False


def longest_run(grammar: str) -> int:
    """Return the longest run of parts that may be empty, in a grammar as xgrammar writes it."""
    sequences = list(_sequences(grammar))
    empty = _empty_rules(sequences)
    longest = 0
    for _, parts in sequences:
        run = 0
        for part in parts:
            run = run + 1 if part.may_be_empty or part.rule in empty else 0
            longest = max(longest, run)
    return longest


def _sequences(grammar: str) -> Iterator[tuple[str, list[_Part]]]:
    """Yield each alternative of each rule, with the name of the rule."""
    for line in grammar.splitlines():
        name, found, body = line.partition(" ::= ")
        if not found:
            continue  # of a rule that is written in several lines, without such parts
        parts: list[_Part] = []
        for token in _TOKEN.findall(body):
            if token not in "()|":
                parts.append(_part(token))
            elif parts:
                yield name, parts
                parts = []


def _part(token: str) -> _Part:
    if token[0] in '"[':
        return _Part(may_be_empty=token == '""' or token.endswith("]*"))
    rule, _, times = token.partition("{")
    return _Part(rule, may_be_empty=times.startswith("0,"))


def _empty_rules(sequences: list[tuple[str, list[_Part]]]) -> set[str]:
    """Return the rules that may be empty."""
    empty: set[str] = set()
    left: list[int] = []  # parts of each sequence that are not known to be empty
    within: dict[str, list[int]] = {}  # sequences in which a rule occurs
    todo: list[str] = []
    for number, (name, parts) in enumerate(sequences):
        needed = [part.rule for part in parts if not part.may_be_empty]
        left.append(len(needed))
        for rule in needed:
            within.setdefault(rule, []).append(number)
        if not needed:
            todo.append(name)
    while todo:
        rule = todo.pop()
        if rule in empty:
            continue
        empty.add(rule)
        for number in within.get(rule, ()):
            left[number] -= 1
            if not left[number]:
                todo.append(sequences[number][0])
    return empty
