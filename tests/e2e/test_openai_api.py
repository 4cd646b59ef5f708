"""Everything that vLLM's API does for text and images, through the router.

Where an answer is determined, it must equal plain vLLM's.
"""

import json
import subprocess
import time
from typing import Any

import pytest

from tests.e2e import same
from tests.e2e.conftest import Endpoint
from tests.pictures import data_uri, picture

QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the river."}]


def picture_question(name: str) -> list[Any]:
    return [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_uri(picture(name))}},
                {"type": "text", "text": "What is this?"},
            ],
        }
    ]


def both(router: Endpoint, plain: Endpoint, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The two endpoints' answers to one body."""
    answers = []
    for endpoint in (router, plain):
        reply = endpoint.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        answers.append(reply.json())
    return answers[0], answers[1]


def test_models(router: Endpoint) -> None:
    (model,) = router.openai.models.list().data
    assert model.id == "demo"


def test_chat_streams_the_text_of_a_plain_answer(router: Endpoint) -> None:
    common: Any = {"model": "demo", "max_tokens": 64, "temperature": 0}
    messages = picture_question("stream")
    whole = router.openai.chat.completions.create(messages=messages, **common)
    chunks = list(
        router.openai.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **common
        )
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    # Not one for each token: what comes while this machine is busy is merged.
    assert len(pieces) > 3, "as they come"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 64


def test_an_echo_is_text_also_in_a_stream(router: Endpoint) -> None:
    messages: Any = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "The answer"},
    ]
    options = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}
    create = router.openai.chat.completions.create
    asked: Any = {
        "model": "demo", "messages": messages, "max_tokens": 2, "temperature": 0,
        "extra_body": options,
    }  # fmt: skip
    whole = create(**asked).choices[0].message.content
    deltas = [chunk.choices[0].delta.content for chunk in create(**asked, stream=True)]
    assert whole.startswith("The answer")
    assert "".join(delta or "" for delta in deltas) == whole


def test_curl(router: Endpoint) -> None:
    body = {"model": "demo", "messages": picture_question("curl"), "max_tokens": 4}
    done = subprocess.run(
        ["curl", "-sS", "--fail", f"{router.url}/v1/chat/completions",
         "-H", "Content-Type: application/json", "-d", "@-"],
        input=json.dumps(body), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_completions(router: Endpoint, plain: Endpoint) -> None:
    body = {
        "model": "demo",
        "prompt": ["Once upon a time", "The weather in Paris"],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
    }
    ours, theirs = both(router, plain, "/v1/completions", body)
    assert [c["text"] for c in ours["choices"]] == [c["text"] for c in theirs["choices"]]
    assert [c["logprobs"]["tokens"] for c in ours["choices"]] == [
        c["logprobs"]["tokens"] for c in theirs["choices"]
    ]


def test_tokens_in_and_tokens_out(router: Endpoint, plain: Endpoint) -> None:
    """What one renders both answer alike, with the picture's tensors and without a picture."""
    question = {"model": "demo", "messages": picture_question("tokens")}
    rendered = both(router, plain, "/v1/chat/completions/render", question)
    assert rendered[0]["token_ids"] == rendered[1]["token_ids"]
    sampling = {"max_tokens": 6, "temperature": 0}
    answers: list[Any] = []
    for made in rendered:
        assert made["features"]["kwargs_data"]["image"][0]
        body = {
            "model": "demo",
            "token_ids": made["token_ids"],
            "features": made["features"],
            "sampling_params": sampling,
        }
        answers += both(router, plain, "/inference/v1/generate", body)
    words = {"model": "demo", "token_ids": list(range(5, 80)), "sampling_params": sampling}
    said = [answer["choices"][0]["token_ids"] for answer in answers]
    assert said[0] and said == [said[0]] * 4
    ours, theirs = both(router, plain, "/inference/v1/generate", words)
    assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
    ours, theirs = both(router, plain, "/inference/v1/generate", words)
    for answer in (ours, theirs):
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    refused = [
        endpoint.http.post("/inference/v1/generate", json=words | {"model": "nobody"})
        for endpoint in (router, plain)
    ]
    assert [answer.status_code for answer in refused] == [404, 404]


def test_completions_stream(router: Endpoint) -> None:
    common: Any = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = router.openai.completions.create(**common)
    stream = router.openai.completions.create(stream=True, **common)
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text


def test_responses(router: Endpoint, plain: Endpoint) -> None:
    def ask(endpoint: Endpoint) -> str:
        reply = endpoint.openai.responses.create(
            model="demo",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "What is this?"},
                        {
                            "type": "input_image",
                            "image_url": data_uri(picture("responses")),
                            "detail": "auto",
                        },
                    ],
                }
            ],
            max_output_tokens=8,
            temperature=0,
        )
        return str(reply.output_text)

    assert ask(router) == ask(plain) != ""


def test_tokenize(router: Endpoint, plain: Endpoint) -> None:
    ours, theirs = both(router, plain, "/tokenize", {"model": "demo", "messages": QUESTION})
    assert ours == theirs


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint it.",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "paint"}}],
    ids=["any", "named"],
)
def test_forced_tool_calls(router: Endpoint, plain: Endpoint, choice: Any) -> None:
    body = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 200,
        "temperature": 0,
    }
    ours, theirs = both(router, plain, "/v1/chat/completions", body)
    calls = [
        [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
        for answer in (ours, theirs)
    ]
    assert calls[0] == calls[1]
    assert calls[0][0]["name"] == "paint"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_call_is_parsed_out_of_the_text(router: Endpoint, stream: bool) -> None:
    common: Any = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_tokens": 200,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": [CALL]}},
    }
    if stream:
        name = parsed = ""
        for chunk in router.openai.chat.completions.create(stream=True, **common):
            for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                assert piece.function is not None
                name += piece.function.name or ""
                parsed += piece.function.arguments or ""
    else:
        message = router.openai.chat.completions.create(**common).choices[0].message
        assert message.tool_calls
        name = message.tool_calls[0].function.name
        parsed = message.tool_calls[0].function.arguments
    assert name == "paint"
    assert json.loads(parsed) == {"colour": "red"}


CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
"""The model can't choose to call a tool; a grammar makes it write a call."""

SAMPLING: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1, "temperature": 1.0},
    {"seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.05},
    {"use_beam_search": True, "n": 2, "max_tokens": 3},
    {"logprobs": 2, "return_token_ids": True, "stop": ["e"], "prompt_logprobs": 1},
    {"logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 30},
    {"echo": True},
    {"stop": ["e", "the"], "include_stop_str_in_output": True, "min_tokens": 3},
    {"stop_token_ids": [100], "logit_bias": {"100": 100}, "include_stop_str_in_output": True},
    {"max_tokens": 0},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"bad_words": ["a", "e"], "ignore_eos": True, "skip_special_tokens": False},
    {"allowed_token_ids": [10, 11]},
    {"allowed_token_ids": []},
    {"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}},
    {"structured_outputs": {"regex": "("}},
    {"response_format": {"type": "json_object"}},
    {"truncate_prompt_tokens": 5, "truncation_side": "left", "cache_salt": "same"},
    {"priority": 1},
    {"stream_interval": 4, "request_id": "same", "kv_transfer_params": {"a": 1}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
CHATS: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "required", "max_tokens": 100},
    {"tools": TOOLS, "tool_choice": "required", "max_tokens": 6, "n": 2, "temperature": 1.0},
    {"tools": TOOLS, "structured_outputs": {"choice": [f"Yes. {CALL}\n{CALL}"]}, "logprobs": True},
    {"tools": TOOLS, "structured_outputs": {"choice": [CALL]}, "return_token_ids": True},
    {"messages": picture_question("same"), "prompt_logprobs": 1, "return_token_ids": True},
    {"messages": [*QUESTION, {"role": "assistant", "content": "It"}],
     "add_generation_prompt": False, "continue_final_message": True},
    {"return_prompt_text": True, "return_token_offsets": True, "logprobs": True},
    {"model": "other"},
]  # fmt: skip
PROMPTS: list[dict[str, Any]] = [
    {"prompt": ["a b", "c d"]},
    {"prompt": ["a b", "c d"], "n": 2, "seed": 1, "temperature": 1.0, "logprobs": 1},
    {"prompt": [[5, 6, 7]], "echo": True, "max_tokens": 0, "logprobs": 2},
    {"prompt": ["a b", "c d"], "echo": True, "logprobs": 1, "return_token_ids": True},
]
INPUTS: list[dict[str, Any]] = [
    {"instructions": "Be kind."},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required",
     "max_output_tokens": 100},
    {"text": {"format": {"type": "json_object"}}},
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"system": [{"type": "text", "text": "Be kind."}], "stop_sequences": ["e"]},
    {"tools": [{"name": "paint", "input_schema": TOOLS[0]["function"]["parameters"]}],
     "tool_choice": {"type": "auto"}},
]  # fmt: skip


def of_chats(options: dict[str, Any]) -> dict[str, Any]:
    """The same options of a chat, which names candidates in another way."""
    if isinstance(count := options.get("logprobs"), int) and not isinstance(count, bool):
        options = options | {"logprobs": True, "top_logprobs": count}
    return options


ASKED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": QUESTION, "max_tokens": 8} | of_chats(each) for each in [*SAMPLING, *CHATS]
    ],
    "/v1/completions": [
        {"prompt": "Once upon a time", "max_tokens": 8} | each for each in [*SAMPLING, *PROMPTS]
    ],
    "/v1/responses": [{"input": "Hello", "max_output_tokens": 8} | each for each in INPUTS],
    "/v1/messages": [{"messages": QUESTION, "max_tokens": 8} | each for each in MESSAGES],
    "/inference/v1/generate": [
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0} | each}
        for each in ({}, {"logprobs": 1, "prompt_logprobs": 1}, {"seed": 1, "temperature": 1.0})
    ],
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_all_that_an_answer_says_is_what_a_plain_vllm_says(
    router: Endpoint, plain: Endpoint, path: str, stream: bool, subtests: pytest.Subtests
) -> None:
    for body in ASKED[path]:
        asked = {"model": "demo", "temperature": 0, "stream": stream} | body
        if path == "/inference/v1/generate":
            del asked["temperature"]
        if not stream:
            asked.pop("stream_options", None)
        with subtests.test(str(body)[:200]):
            same.compare(router, plain, path, asked)


def test_structured_outputs(router: Endpoint, plain: Endpoint) -> None:
    body = {
        "model": "demo",
        "messages": QUESTION,
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {
                    "type": "object",
                    "properties": {"deep": {"type": "boolean"}},
                    "required": ["deep"],
                    "additionalProperties": False,
                },
            },
        },
    }
    ours, theirs = both(router, plain, "/v1/chat/completions", body)
    content = ours["choices"][0]["message"]["content"]
    assert content == theirs["choices"][0]["message"]["content"]
    assert isinstance(json.loads(content)["deep"], bool)


def test_a_cache_salt_separates(router: Endpoint) -> None:
    def cached(salt: str) -> int:
        reply = router.http.post(
            "/v1/chat/completions",
            json={
                "model": "demo",
                "messages": picture_question("salted"),
                "max_tokens": 2,
                "cache_salt": salt,
            },
        ).json()
        details = reply["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_a_disconnect_aborts_on_the_worker(router: Endpoint) -> None:
    stream = router.openai.chat.completions.create(
        model="demo",
        messages=picture_question("disconnect"),
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert next(iter(stream)).choices
    assert sum(int(str(w["active_requests"])) for w in router.workers().values()) == 1
    stream.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        views = router.workers().values()
        if all(w["active_requests"] == 0 and w["running"] == 0 for w in views):
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {router.workers()}")


def test_items_are_scored_as_by_vllm(router: Endpoint, plain: Endpoint) -> None:
    """Their texts become tokens in a thread here."""
    body = {
        "model": "demo",
        "query": "Which?",
        "items": [" one", " two"],
        "label_token_ids": [5, 6],
    }
    ours, theirs = (each.http.post("/generative_scoring", json=body) for each in (router, plain))
    assert ours.status_code == theirs.status_code == 200, ours.text
    scores = [[item["score"] for item in each.json()["data"]] for each in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    reply = router.http.post("/generative_scoring", json=body | {"query": "x" * 300_000})
    assert reply.status_code == 400
    assert "send parts of it" in reply.text
    for query in ([5] * 2000, "a " * 2000):
        many = {"query": query, "items": [" one"] * 1000}
        reply = router.http.post("/generative_scoring", json=body | many)
        assert (reply.status_code, "send several requests" in reply.text) == (400, True)


@pytest.mark.parametrize("end", ["\ufffd", "👧"])
def test_an_answer_does_not_repeat_its_prompt(router: Endpoint, end: str) -> None:
    """The prompt ends with U+FFFD, or within a letter."""
    reply = router.http.post("/tokenize", json={"model": "demo", "prompt": "word " * 200 + end})
    prompt = reply.json()["tokens"]
    body = {"model": "demo", "prompt": prompt if end == "\ufffd" else prompt[:-1], "max_tokens": 5}
    reply = router.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "word word" not in reply.json()["choices"][0]["text"]
