"""What is known of a target's cache: the three words and their reasons.

How a state comes about is in ``standing.py``.
"""

from enum import StrEnum
from typing import NamedTuple


class Knowledge(StrEnum):
    """How far the index of a target can be trusted."""

    EXACT = "exact"
    """The index equals the worker's cache as of its last event."""
    DEGRADED = "degraded"
    """Every indexed block is there, but some the worker holds are unknown; or a
    replay is under way, and until it ends none of the target's blocks is used."""
    APPROXIMATE = "approximate"
    """No usable events: only predictions from what was routed there."""


class IndexState(NamedTuple):
    """State of one target's index.

    Attributes:
        knowledge: how far it can be trusted.
        reason: a sentence for operators; empty when exact.
    """

    knowledge: Knowledge
    reason: str = ""


EXACT = IndexState(Knowledge.EXACT)


def degraded(reason: str) -> IndexState:
    """A :attr:`Knowledge.DEGRADED` state."""
    return IndexState(Knowledge.DEGRADED, reason)


def approximate(reason: str) -> IndexState:
    """A :attr:`Knowledge.APPROXIMATE` state."""
    return IndexState(Knowledge.APPROXIMATE, reason)
