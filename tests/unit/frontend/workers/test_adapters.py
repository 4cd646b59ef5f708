"""Which adapters vLLM's server finds, as workers with them come and go."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from common.identity import WorkerId
from common.request_plane.card import Adapter, WorkerCard
from frontend.http.server.vllm_server import share_adapters
from frontend.workers.adapters import Adapters
from tests.fakes.cards import make_card


def card(worker_id: str, **adapters: str) -> WorkerCard:
    known = [Adapter(name=name, path=path) for name, path in adapters.items()]
    return make_card(worker_id, adapters=known)


def paths(adapters: Adapters) -> dict[str, str]:
    return {name: request.lora_path for name, request in adapters.requests.items()}


def test_an_adapter_is_there_while_a_worker_has_it() -> None:
    adapters = Adapters()
    adapters.joined(card("a", story="/s", poem="/p"))
    adapters.joined(card("b", story="/s"))
    adapters.joined(card("c"))
    first = adapters.requests["story"]
    adapters.left(WorkerId("a"))
    assert paths(adapters) == {"story": "/s"}
    assert adapters.requests["story"] is first
    adapters.left(WorkerId("a"))
    adapters.left(WorkerId("b"))
    assert not adapters.requests


def test_a_worker_that_joins_again_counts_once() -> None:
    adapters = Adapters()
    adapters.joined(card("a", story="/s"))
    adapters.joined(card("a", poem="/p"))
    assert paths(adapters) == {"poem": "/p"}
    adapters.left(WorkerId("a"))
    assert not adapters.requests


def test_other_files_by_the_same_name_wait(caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters()
    adapters.joined(card("a", story="/s"))
    with caplog.at_level(logging.WARNING):
        adapters.joined(card("b", story="/other"))
    assert "adapter story is at /other on worker b" in caplog.text
    assert paths(adapters) == {"story": "/s"}
    adapters.left(WorkerId("a"))
    assert paths(adapters) == {"story": "/other"}


async def test_vllms_server_lists_them_and_nothing_takes_the_models_name() -> None:
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8), renderer=None, input_processor=None
    )
    models = OpenAIServingModels(engine, [BaseModelPath("demo", "/m")])
    app: Any = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    adapters = Adapters()
    adapters.joined(card("a", demo="/evil", story="/s"))
    share_adapters(app, adapters)
    adapters.joined(card("b", demo="/evil", poem="/p"))
    listed = (await models.show_available_models()).data
    assert [(one.id, one.root, one.parent) for one in listed] == [
        ("demo", "/m", None),
        ("story", "/s", "demo"),
        ("poem", "/p", "demo"),
    ]
    adapters.left(WorkerId("a"))
    assert [one.id for one in (await models.show_available_models()).data] == ["demo", "poem"]
