"""Structures of answers that cost too much to compile reach neither vLLM here nor an engine."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
import pytest_asyncio
import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.inputs import tokens_input
from vllm.parser import abstract_parser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar

from common.errors import OverloadedError, RequestRejectedError
from common.request_plane.card import WorkerCard
from frontend.bounded import structure_server
from frontend.bounded.forks import Bounds
from frontend.bounded.orders import COMPILES, REFUSED, Structure
from frontend.bounded.work import BoundedWork
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy
from frontend.processing import structures
from frontend.processing.preprocessor import Preprocessor
from frontend.processing.renderer import build_config, build_renderer
from frontend.processing.settings import PreprocessSettings
from frontend.processing.structures import StructureTrials
from frontend.request_context import RequestContext, Tenant, begin

BOUNDS: Final = Bounds(cpu_s=1, memory_bytes=512 << 20, alarm_s=120)
MANY: Final[dict[str, dict[str, Any]]] = {f"p{n}": {} for n in range(3000)}
SLOW: Final = 'root ::= "{}" ' + '"a"? ' * 2000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trials(card: WorkerCard, serve_args: Namespace) -> AsyncIterator[StructureTrials]:
    renderer = build_renderer(card, serve_args)
    trials = StructureTrials(build_config(card, serve_args), renderer.tokenizer, BOUNDS)
    yield trials
    trials.close()
    renderer.shutdown()


def asked(**wanted: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object", "properties": MANY, "minProperties": 1500}},
        {"json": json.dumps({"type": "object", "properties": MANY, "minProperties": 1500})},
        {"grammar": SLOW.format("grammar")},
        {"regex": "(a*)*" * 20_000},
        {"regex": "(a*)*" * 1000},
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {"type": "regex", "pattern": "(a*)*" * 20_000},
                }
            )
        },
        {"json": {"type": "array", "minItems": 100_000_000}},
        {"json": {"items": {"type": "integer", "multipleOf": 2}, "maxItems": 100_000_000}},
        {"json": {"type": "string", "pattern": "^(ab?){3000}$"}},
        {"regex": "x" * 1000 + "(a*)*" * 200},
        {"grammar": 'start: %json {"type": "array", "minItems": 3000000}'},
    ],
    ids=[
        "schema",
        "schema as text",
        "grammar",
        "regex",
        "regex whose masks take long",
        "structural tag",
        "schema that xgrammar refuses",
        "schema that vLLM does not give to xgrammar",
        "pattern that xgrammar reads for seconds",
        "regex whose masks take long behind a text",
        "grammar that takes memory to read",
    ],
)
async def test_what_costs_too_much_is_refused(
    trials: StructureTrials, wanted: dict[str, Any]
) -> None:
    with pytest.raises(RequestRejectedError, match=r"takes more than 1 s of a core or 512 MiB"):
        await trials.check(asked(**wanted))
    await trials.check(asked(regex="yes|no"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}},
        {"json_object": True},
        {"regex": r"\d{4}-\d{2}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "yes" | "no"'},
        {"grammar": 'start: "yes" | "no"'},
        {
            "structural_tag": json.dumps(
                {
                    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
                    "triggers": ["<a>"],
                }
            )
        },
        {"json": {"type": "array", "minItems": 100}},
        {"grammar": "no grammar at all"},
        {"regex": "("},
        {"json": {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}},
        {"json": {"const": "\ud800"}},
        {"regex": "\ud800"},
    ],
)
async def test_others_pass_and_what_is_wrong_with_one_vllm_says(
    trials: StructureTrials, wanted: dict[str, Any]
) -> None:
    await trials.check(asked(**wanted))
    await trials.check(SamplingParams())


@pytest.mark.asyncio(loop_scope="module")
async def test_masks_of_all_choices_and_prompts_of_a_request_are_counted(
    trials: StructureTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = asked(regex="(a*)*" * 30)
    monkeypatch.setattr(structures, "MAX_STEP_S", 0.0)
    begin()
    await trials.check(slow)
    with pytest.raises(RequestRejectedError, match="so many choices or prompts"):
        await trials.check(slow)
    begin()
    slow.n = 2
    with pytest.raises(RequestRejectedError, match="so many choices or prompts"):
        await trials.check(slow)


@pytest.mark.asyncio(loop_scope="module")
async def test_masks_of_all_requests_of_a_client_leave_time_to_others(
    trials: StructureTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of 14 choices kept others waiting for 19 s, each within its own limit."""
    slow = asked(regex="(a*)*" * 30)
    monkeypatch.setattr(structures, "FEW_S", 0.0)
    monkeypatch.setattr(structures, "SHARE_S", 1e-9)

    def ask(
        peer: str, params: SamplingParams, engines: int = 1
    ) -> tuple[RequestContext, asyncio.Task[None]]:
        context = begin()
        context.peer = peer
        return context, asyncio.create_task(trials.check(params, engines))

    one, first = ask("10.0.0.1", slow)
    await first
    _, another = ask("10.0.0.1", slow)
    _, of_another = ask("10.0.0.2", slow)
    _, without = ask("10.0.0.1", SamplingParams())
    of_many, in_large_fleet = ask("10.0.0.1", slow, engines=10**9)
    await asyncio.gather(of_another, without, in_large_fleet)
    of_many.held.close()
    assert not another.done()
    for many, calls in ((1, 2), (5, 1)):
        begin().peer = "10.0.0.1"
        slow.n = many
        calling = [asyncio.create_task(trials.check(slow)) for _ in range(calls)]
        with pytest.raises(OverloadedError, match="other requests of this client"):
            await calling.pop()  # would hold what other clients' calls wait for
        for task in calling:
            task.cancel()
    one.held.close()
    await another


@pytest.mark.asyncio(loop_scope="module")
async def test_equal_ones_are_tried_once(trials: StructureTrials) -> None:
    tried = []
    ask = trials._work.ask

    async def counted(order: Any) -> bytes:
        tried.append(order)
        return await ask(order)

    trials._work.ask = counted  # type: ignore[method-assign]
    try:
        await asyncio.gather(*(trials.check(asked(regex="once|twice")) for _ in range(9)))
        await trials.check(asked(regex="once|twice"))
    finally:
        trials._work.ask = ask  # type: ignore[method-assign]
    assert len(tried) == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("many", "one"),
    [
        (("many", "10.0.0.1"), ("one", "10.0.0.1")),
        (("", "10.0.0.2"), ("", "10.0.0.3")),
        (("", "2001:db8:1::1"), ("", "2001:db8:2::1%eth0")),
    ],
    ids=["API keys", "hosts without keys", "networks"],
)
async def test_a_client_with_many_slow_ones_keeps_no_other_waiting(
    trials: StructureTrials,
    many: tuple[str, str],
    one: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, others_turn, ask = [], asyncio.Event(), trials._slow_work.ask

    async def ask_later(structure: Structure) -> bytes:
        await others_turn.wait()
        return await ask(structure)

    monkeypatch.setattr(trials._slow_work, "ask", ask_later)

    async def of(client: tuple[str, str], name: str, grammar: str) -> None:
        context = begin()
        context.tenant, context.peer = Tenant(client[0]), client[1]
        try:
            await trials.check(asked(grammar=grammar))
        except RequestRejectedError:
            done.append(f"{name} refused")
        else:
            done.append(name)
        if name == "quick":
            others_turn.set()

    trials._outcomes.clear()
    first = [of(many, f"slow {n}", SLOW.format(n)) for n in range(2)]
    quick = 'root ::= "q"'
    await asyncio.gather(*first, of(many, "its quick", quick), of(one, "quick", quick))
    assert done == ["quick", "slow 0 refused", "slow 1 refused", "its quick"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_was_lost_twice_says_nothing_of_a_structure(
    trials: StructureTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trials.check(asked(regex="before"))
    assert trials._work.process is not None
    trials._work.process.spawned.kill()
    await trials.check(asked(regex="after"))
    with monkeypatch.context() as patched:
        patched.setattr(trials._work, "_most_s", 0.01)  # shorter than the start of the next
        trials._work.process.spawned.kill()
        with pytest.raises(OverloadedError, match="lost"):
            await trials.check(asked(regex="(once|twice|thrice){9,99}"))
    await trials.check(asked(regex="(once|twice|thrice){9,99}"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": MANY, "patternProperties": {"^a": {}}},
        {"type": "object", "patternProperties": {"^a": {}, "^b": {}}},
        {"type": "array", "items": {"patternProperties": {"(": {}}, "$ref": "#/$defs/none"}},
    ],
    ids=["beside properties", "several", "which xgrammar does not read"],
)
@pytest.mark.parametrize("read", [lambda schema: schema, json.dumps], ids=["object", "text"])
async def test_what_would_fall_to_outlines_is_refused(
    trials: StructureTrials, schema: dict[str, Any], read: Callable[[Any], Any]
) -> None:
    with pytest.raises(RequestRejectedError, match=r"patternProperties.*set \"backend\".*outlines"):
        await trials.check(asked(json=read(schema)))


@pytest.mark.asyncio(loop_scope="module")
async def test_for_old_tokenizers_of_mistral_all_that_xgrammar_refuses_is_refused(
    trials: StructureTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "is_old_mistral", lambda _: True)
    with pytest.raises(RequestRejectedError, match="ask the operator"):
        await trials.check(asked(regex="("))
    await trials.check(asked(regex="yes|no"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("tag", ["{}", "no JSON"])
async def test_a_tag_that_xgrammar_does_not_take_is_refused(
    trials: StructureTrials, tag: str
) -> None:
    with pytest.raises(RequestRejectedError, match="structural_tag: auto does not take it"):
        await trials.check(asked(structural_tag=tag))


@pytest.mark.parametrize(
    "order", [Structure("lark", "no grammar"), Structure("regex", "("), Structure("json", "[")]
)
def test_a_wrong_structure_whose_reading_takes_long_costs_too_much(
    order: Structure, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = xgrammar.TokenizerInfo(["a", "b"])
    assert structure_server.compile_by_guidance(False, order).startswith(COMPILES)
    assert structure_server.compile_by_xgrammar(info, False, True, order) == REFUSED
    monkeypatch.setattr(structure_server, "READ_S", 0.0)
    assert structure_server.compile_by_guidance(False, order) == b""
    for falls_back in (False, True):
        assert structure_server.compile_by_xgrammar(info, False, falls_back, order) == b""


@pytest.mark.parametrize("kind", ["structured_outputs", "response_format"])
@pytest.mark.usefixtures("trials")
def test_vllm_compiles_no_tag_while_it_reads_a_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", pytest.fail)
    schema = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = {"type": "structural_tag", "format": schema}
    body = {"structured_outputs": {"structural_tag": json.dumps(tag)}, "response_format": tag}
    ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], kind: body[kind]}
    )


@pytest.mark.usefixtures("trials")
def test_vllm_compiles_no_structure_of_a_chat_with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", pytest.fail)
    wanted = StructuredOutputsParams(json={"type": "object"})
    assert abstract_parser._xgrammar_supports(wanted)
    wanted = StructuredOutputsParams(json={"type": "integer", "multipleOf": 2})
    assert not abstract_parser._xgrammar_supports(wanted)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["guidance", "outlines"])
async def chosen(
    request: pytest.FixtureRequest, card: WorkerCard, serve_args: Namespace
) -> AsyncIterator[StructureTrials]:
    renderer = build_renderer(card, serve_args)
    config = build_config(card, serve_args)
    config.structured_outputs_config.backend = request.param
    trials = StructureTrials(config, renderer.tokenizer, BOUNDS)
    yield trials
    trials.close()
    renderer.shutdown()


@pytest.mark.asyncio(loop_scope="module")
async def test_structures_are_tried_by_the_backend_of_the_operator(chosen: StructureTrials) -> None:
    optional = {f"p{n}": {"type": "string"} for n in range(400)}
    slow = {
        "guidance": {"type": "array", "minItems": 100_000_000},
        "outlines": {"type": "object", "properties": optional},
    }
    with pytest.raises(RequestRejectedError, match=r"takes more than 1 s of a core or 512 MiB"):
        await chosen.check(asked(json=slow[chosen._backend]))
    wanted: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"regex": r"\d{4}-\d{2}"},
        {"regex": "("},
        {"choice": ["yes", "no."]},
    ]
    for each in wanted:
        await chosen.check(asked(**each))


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_compiled_by_a_backend_that_no_trial_bounds(
    card: WorkerCard, serve_args: Namespace
) -> None:
    config = build_config(card, serve_args)
    config.structured_outputs_config.backend = "lm-format-enforcer"
    other = StructureTrials(config, object(), BOUNDS)
    with pytest.raises(RequestRejectedError, match=r'lm-format-enforcer.*set "backend"'):
        await other.check(asked(json_object=True))
    await other.check(SamplingParams())
    assert other._work.process is None
    other.close()


async def test_a_preprocessor_tries_them_before_vllm_reads_them(
    card: WorkerCard, serve_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = MediaLoader(FetchPolicy(), 0)
    preprocessor = Preprocessor(
        card, serve_args, loader=loader, arena=None, settings=PreprocessSettings()
    )
    tried = []

    async def too_much(_: object, structure: Structure) -> bytes:
        tried.append(structure.text)
        return b""

    monkeypatch.setattr(BoundedWork, "ask", too_much)
    try:
        with pytest.raises(RequestRejectedError, match="takes more than 10 s"):
            await preprocessor.process(tokens_input([1, 2]), asked(regex="("), "r", None)
    finally:
        await preprocessor.close()
        await loader.close()
    assert tried == ["(", "("], "in the second process too"
