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
from frontend.workers import adapters as adapters_module
from frontend.workers.adapters import Adapters
from tests.fakes.cards import make_card


def card(worker_id: str, **adapters: str) -> WorkerCard:
    known = [Adapter(name=name, path=path) for name, path in adapters.items()]
    return make_card(worker_id, adapters=known)


def paths(adapters: Adapters) -> dict[str, str]:
    return {name: request.lora_path for name, request in adapters.requests.items()}


def test_an_adapter_is_there_while_a_worker_has_it() -> None:
    adapters = Adapters()
    adapters.changed(WorkerId("a"), card("a", story="/s", poem="/p").adapters)
    adapters.changed(WorkerId("b"), card("b", story="/s").adapters)
    adapters.changed(WorkerId("c"), card("c").adapters)
    first = adapters.requests["story"]
    adapters.left(WorkerId("a"))
    assert paths(adapters) == {"story": "/s"}
    assert adapters.requests["story"] is first
    adapters.left(WorkerId("a"))
    adapters.left(WorkerId("b"))
    assert not adapters.requests


def test_a_worker_that_joins_again_counts_once() -> None:
    adapters = Adapters()
    adapters.changed(WorkerId("a"), card("a", story="/s").adapters)
    adapters.changed(WorkerId("a"), card("a", poem="/p").adapters)
    assert paths(adapters) == {"poem": "/p"}
    adapters.left(WorkerId("a"))
    assert not adapters.requests


def test_other_files_by_the_same_name_wait(caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters()
    adapters.changed(WorkerId("a"), card("a", story="/s").adapters)
    with caplog.at_level(logging.WARNING):
        adapters.changed(WorkerId("b"), card("b", story="/other").adapters)
    assert "adapter story is at /other on worker b" in caplog.text
    assert paths(adapters) == {"story": "/s"}
    adapters.left(WorkerId("a"))
    assert paths(adapters) == {"story": "/other"}


def test_many_other_files_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that reported other paths again and again wrote a line for each adapter."""
    adapters = Adapters()
    adapters.changed(WorkerId("a"), card("a", story="/s", poem="/p").adapters)
    with caplog.at_level(logging.WARNING):
        adapters.changed(WorkerId("b"), card("b", story="/other", poem="/other").adapters)
    (record,) = caplog.records
    assert "2 adapters of this worker" in record.getMessage()


def test_no_more_names_than_a_listing_has_time_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapters_module, "MAX_NAMES", 2)
    adapters = Adapters()
    with caplog.at_level(logging.WARNING):
        adapters.changed(WorkerId("a"), card("a", story="/s").adapters)
        adapters.changed(WorkerId("b"), card("b", poem="/p", song="/g").adapters)
    assert paths(adapters) == {"story": "/s", "poem": "/p"}
    assert "1 adapters of worker b are not served" in caplog.text
    adapters.left(WorkerId("a"))
    adapters.changed(WorkerId("b"), card("b", poem="/p", song="/g").adapters)
    assert paths(adapters) == {"poem": "/p", "song": "/g"}


async def test_vllms_server_lists_them_and_nothing_takes_the_models_name() -> None:
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8), renderer=None, input_processor=None
    )
    models = OpenAIServingModels(engine, [BaseModelPath("demo", "/m")])
    app: Any = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    adapters = Adapters()
    adapters.changed(WorkerId("a"), card("a", demo="/evil", story="/s").adapters)
    share_adapters(app, adapters)
    adapters.changed(WorkerId("b"), card("b", demo="/evil", poem="/p").adapters)
    listed = (await models.show_available_models()).data
    assert [(one.id, one.root, one.parent) for one in listed] == [
        ("demo", "/m", None),
        ("story", "/s", "demo"),
        ("poem", "/p", "demo"),
    ]
    adapters.left(WorkerId("a"))
    assert [one.id for one in (await models.show_available_models()).data] == ["demo", "poem"]
