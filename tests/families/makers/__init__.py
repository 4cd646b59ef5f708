"""Makers of tiny models: each module has some that are alike.

A maker gives a configuration, a tokenizer and a processor; ``tests/families/draw.py`` gives the
weights. What can't be made stands in ``tests/families/catalog.py`` with its reason.
"""

from collections.abc import Callable

from tests.families.makers import (
    chats,
    eyes,
    gemmas,
    glms,
    hearers,
    kimi_audio,
    known,
    llavas,
    natives,
    onevision2,
    processors,
    qwens,
    sounds,
    standins,
    texts,
    tiles,
    twins,
    vlms,
)
from tests.families.makers.base import Tiny

_MODULES = (
    chats, eyes, gemmas, glms, hearers, kimi_audio, known, llavas, natives, onevision2,
    processors, qwens, sounds, standins, texts, tiles, twins, vlms,
)  # fmt: skip

MAKERS: dict[str, Callable[[], Tiny]] = {
    name: maker
    for module in _MODULES
    for name, maker in vars(module).items()
    if getattr(maker, "__module__", "") == module.__name__
    and getattr(maker, "__annotations__", {}) == {"return": Tiny}
}
"""By name: the public functions that take nothing and return a model."""

ELSEWHERE = frozenset({"whisper"})
"""Of models that no chat goes through; ``tests/e2e/test_speech.py`` asks them."""
