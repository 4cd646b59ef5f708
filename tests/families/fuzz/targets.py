"""What is fuzzed: families, and what is sent to each."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.families import adapters
from tests.families.case import DEMO, Case
from tests.families.catalog import CASES
from tests.families.fuzz.bodies import chat, completion
from tests.families.fuzz.pooling_bodies import pooling

Body = dict[str, object]
Sent = tuple[str, Body]

_WORDS = "once upon a time"
_SAID: Sent = (
    "/v1/completions",
    {"model": "demo", "prompt": _WORDS, "max_tokens": 8, "temperature": 0},
)
_POOLED: Sent = ("/v1/embeddings", {"model": "demo", "input": _WORDS})


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        case: what runs; ``{dir}`` in its flags is the one that ``prepare`` is given.
        draw: a request.
        sane: one that is answered alike before and after.
        prepare: writes what else it needs.
        env: of worker and frontend.
    """

    case: Case
    draw: Callable[[random.Random], Sent]
    sane: Sent = _SAID
    prepare: Callable[[Path], object] = lambda _: None
    env: Mapping[str, str] = field(default_factory=dict)


def generating(draw: random.Random) -> Sent:
    if draw.random() < 0.15:
        return "/v1/completions", completion(draw)
    return "/v1/chat/completions", chat(draw)


_LAYERS = "language_model.model.layers"
_GOOD = ("ode", "poem", "story")
_ODD = ("deep", "wide", "nan", "garbled", "empty")


def _write_adapters(directory: Path) -> None:
    for seed, name in enumerate((*_GOOD, "garbled")):
        adapters.write_adapter(directory / name, _LAYERS, seed)
    adapters.write_adapter(directory / "deep", _LAYERS, rank=64)
    adapters.write_adapter(directory / "wide", _LAYERS, wider=64)
    adapters.write_adapter(directory / "nan", _LAYERS, scale=float("nan"))
    (directory / "garbled" / "adapter_model.safetensors").write_bytes(b"nothing" * 50)
    (directory / "empty").mkdir()


def adapting(draw: random.Random) -> Sent:
    """Requests for adapters that may be there, while they come and go."""
    name = draw.choice((*_GOOD, *_ODD, "", "demo", "nobody"))
    if draw.random() < 0.8:
        path, body = generating(draw)
        return path, body | {"model": draw.choice((name, "ode", "demo"))}
    where = draw.choice(("{dir}/" + name, "{dir}/" + name, "/etc", "", "no/where", "{dir}/../.."))
    if draw.random() < 0.4:
        return "/v1/unload_lora_adapter", {"lora_name": name}
    body = {"lora_name": name, "lora_path": where, "load_inplace": draw.random() < 0.3}
    return "/v1/load_lora_adapter", body


_POOLING = ("--runner=pooling", "--convert=embed")
_ADAPTED = (*adapters.FLAGS, "--lora-modules=story={dir}/story")

_SPECIAL = (
    Target(Case("embeddings", DEMO, flags=_POOLING, mode="a model that pools"), pooling, _POOLED),
    Target(
        Case("adapters", "llava", flags=_ADAPTED, mode="adapters that come and go"),
        adapting,
        prepare=_write_adapters,
        env=adapters.ALLOWED,
    ),
)

TARGETS: dict[str, Target] = {
    **{name: Target(case, generating) for name, case in CASES.items()},
    **{target.case.name: target for target in _SPECIAL},
}
