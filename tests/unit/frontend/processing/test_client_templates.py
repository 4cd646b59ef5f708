"""Chat templates of clients: vLLM's prompts, within limits, and never in the frontend's process."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, hf
from vllm.renderers.params import ChatParams

from common.request_plane.card import WorkerCard
from frontend.processing.client_templates import STAND_INS, ClientTemplates, take_templates
from frontend.processing.renderer import build_renderer
from tests.waiting import until

ROLES = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "<{{ part['type'] }}:{{ part['text'] }}>{% endfor %}{% endfor %}"
)
SLOW = "{{ (3 ** 400000000) % 7 }}"
CHAT: list[Any] = [
    {"role": "system", "content": "be \ud800 brief"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def templates(card: WorkerCard, serve_args: Namespace) -> AsyncIterator[ClientTemplates]:
    renderer = build_renderer(card, serve_args)
    templates = take_templates(renderer, "the server's own")
    assert templates is not None
    yield templates
    templates.close()
    renderer.shutdown()


@pytest.fixture
def ours(templates: ClientTemplates) -> BaseRenderer:
    return templates._renderer


def test_stand_ins_have_the_formats_that_they_stand_for() -> None:
    for name, template in STAND_INS.items():
        assert hf._detect_content_format(template, default="string") == name


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("template", "options"),
    [
        (ROLES, {}),
        (PARTS, {}),
        ("{{ eos_token }}{{ tone }}{{ tools }}", {"tone": "kind", "tools": [{"type": "function"}]}),
        (ROLES + "{% if add_generation_prompt %}!{% endif %}", {"add_generation_prompt": True}),
        (ROLES, {"continue_final_message": True}),
        (None, {}),
    ],
    ids=["text", "parts", "variables", "its end", "goes on", "the model's"],
)
async def test_prompts_are_vllms(
    ours: BaseRenderer, vllm_renderer: BaseRenderer, template: str | None, options: dict[str, Any]
) -> None:
    params = ChatParams(chat_template=template, chat_template_kwargs={"tokenize": False} | options)
    expected = await vllm_renderer.render_messages_async(CHAT, params)
    assert await ours.render_messages_async(CHAT, params) == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_one_among_the_options_is_a_clients_too(ours: BaseRenderer) -> None:
    options = {"tokenize": False, "chat_template": SLOW}
    with pytest.raises(VLLMValidationError, match="takes more than 2 s"):
        await ours.render_messages_async(CHAT, ChatParams(chat_template_kwargs=options))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ (3 ** 400000000) % 7 }}", "takes more than 2 s"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "2 s"),
        ("{{ ('a' * 9000000000) | length }}", "takes too much"),
        ("{{ 'a' * 70000000 }}", "too long|takes too much"),
        ("{{" + "a+" * 120_000 + "a}}", "recursion|2 s"),
        ("{{", "unexpected"),
        ("{{ raise_exception('nothing for you') }}", "nothing for you"),
    ],
    ids=["arithmetic", "loops", "memory", "text", "depth", "syntax", "its own error"],
)
async def test_what_costs_too_much_is_a_400(ours: BaseRenderer, template: str, said: str) -> None:
    params = ChatParams(chat_template=template, chat_template_kwargs={"tokenize": False})
    with pytest.raises(VLLMValidationError, match=said):
        await ours.render_messages_async(CHAT, params)
    good = ChatParams(chat_template=ROLES, chat_template_kwargs={"tokenize": False})
    _, prompt = await ours.render_messages_async(CHAT[1:], good)
    assert prompt["prompt"] == "[user]one\ntwo"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_lost_process_is_started_again(
    templates: ClientTemplates, ours: BaseRenderer
) -> None:
    params = ChatParams(chat_template=ROLES + "1", chat_template_kwargs={"tokenize": False})
    _, before = await ours.render_messages_async(CHAT[1:], params)
    assert templates._work.process is not None
    templates._work.process.spawned.kill()
    assert (await ours.render_messages_async(CHAT[1:], params))[1] == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_keeps_nobody_waiting(ours: BaseRenderer) -> None:
    params = ChatParams(chat_template=ROLES + "2", chat_template_kwargs={"tokenize": False})
    leaving = [asyncio.ensure_future(ours.render_messages_async(CHAT, params)) for _ in range(3)]
    await asyncio.sleep(0)
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await ours.render_messages_async(CHAT, params)


@pytest.mark.asyncio(loop_scope="module")
async def test_who_leaves_keeps_its_turn_until_the_process_is_free(
    templates: ClientTemplates, ours: BaseRenderer
) -> None:
    """Or others would wait behind its template without an end to their waiting."""
    slow = ChatParams(chat_template=SLOW, chat_template_kwargs={"tokenize": False})
    leaving = asyncio.ensure_future(ours.render_messages_async(CHAT, slow))
    await until(templates._work._turn.locked)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert templates._work._turn.locked()
    params = ChatParams(chat_template=ROLES + "3", chat_template_kwargs={"tokenize": False})
    await ours.render_messages_async(CHAT[1:], params)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_template_that_is_no_text_is_rendered_as_one(ours: BaseRenderer) -> None:
    options = {"tokenize": False, "chat_template": ["x"]}
    _, prompt = await ours.render_messages_async(CHAT, ChatParams(chat_template_kwargs=options))
    assert "['x']" in str(prompt)


def test_where_nobody_can_wait_none_is_taken(ours: BaseRenderer) -> None:
    with pytest.raises(VLLMValidationError, match="leave it out"):
        ours.render_messages(CHAT, ChatParams(chat_template=ROLES))
    ours.render_messages(CHAT[1:], ChatParams(chat_template_kwargs={"tokenize": False}))
