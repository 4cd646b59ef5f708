"""A tiny model's renderer, without an engine, and media for it."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing

import pytest
from vllm.renderers import BaseRenderer

from common.request_plane.card import WorkerCard
from common.transfer.arena.arena import Arena
from frontend.args import parse
from frontend.processing.renderer import build_renderer
from tests.demo_model import shared_demo_model
from tests.fakes.cards import make_card


@pytest.fixture(scope="package")
def card(tmp_path_factory: pytest.TempPathFactory) -> WorkerCard:
    """Of a worker that serves the demo model."""
    model = str(shared_demo_model(tmp_path_factory))
    return make_card(model={"model": model, "tokenizer": model})


@pytest.fixture(scope="package")
def serve_args() -> Namespace:
    return parse([]).serve


@pytest.fixture(scope="package")
def vllm_renderer(card: WorkerCard, serve_args: Namespace) -> Iterator[BaseRenderer]:
    """As vLLM made it: what ours is compared with."""
    renderer = build_renderer(card, serve_args)
    yield renderer
    renderer.shutdown()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(64 << 20, prefault=False)) as arena:
        yield arena
