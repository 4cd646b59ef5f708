"""Embeddings, scores and classes of text and pictures: the numbers that a plain vLLM gives.

One kind of model after the other, for the sake of memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.lab import hf_runs, image, words
from tests.e2e.processes import start_frontend, start_plain_vllm, start_worker
from tests.pictures import data_uri, picture

A_OR_B = {
    "classifier_from_token": ["a", "b"],
    "method": "from_2_way_softmax",
    "text_config": {"tie_word_embeddings": False},  # where vLLM looks for it
}
KINDS = {
    "embed": ["--runner=pooling", "--convert=embed"],
    "tokens": [
        "--runner=pooling",
        "--convert=embed",
        '--pooler-config={"task": "token_embed"}',
    ],
    "rerank": ["--runner=pooling", "--convert=classify", f"--hf-overrides={json.dumps(A_OR_B)}"],
}
LONG = "Every worker keeps the blocks that it has computed. " * 20


@dataclass(frozen=True)
class PoolingLab:
    """A frontend over one worker, and a plain vLLM, of one kind of model."""

    router: Endpoint
    plain: Endpoint

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Our answer, once it is plain vLLM's."""
        answers = [
            endpoint.http.post(path, json={"model": "demo", **body})
            for endpoint in (self.router, self.plain)
        ]
        ours, theirs = answers
        assert ours.status_code == theirs.status_code, ours.text
        if ours.status_code != 200:
            mine, other = ours.json(), theirs.json()
            if other == {"detail": "Not Found"}:
                assert f"There is no POST {path}" in mine["error"]["message"]
                return dict(mine)
            if "maximum context length" in other["error"]["message"]:
                other["error"]["code"] = "context_length_exceeded"
            assert mine == other
            return dict(mine)
        ours_body, theirs_body = (answer.json() for answer in answers)
        assert numbers(ours_body) == pytest.approx(numbers(theirs_body), rel=1e-4, abs=1e-5)
        assert ours_body.keys() == theirs_body.keys()
        assert ours_body.get("usage") == theirs_body.get("usage")
        return dict(ours_body)

    def decision(self, response: dict[str, Any], number: int = 0) -> dict[str, Any]:
        return self.router.decision(f"{response['id']}-{number}")


def numbers(value: Any, key: str = "") -> list[float]:
    """All that are in an answer, but for its time."""
    if isinstance(value, dict):
        return [one for name, each in value.items() for one in numbers(each, name)]
    if isinstance(value, list):
        return [one for each in value for one in numbers(each, key)]
    return [float(value)] if isinstance(value, (int, float)) and key != "created" else []


@pytest.fixture(scope="module")
def lab(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    let_go: LetGo,
) -> Iterator[PoolingLab]:
    kind: str = request.param
    logs, cards = tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp(f"{kind}-cards")
    worker = start_worker(kind, model, cards, logs, *KINDS[kind])
    plain = start_plain_vllm(model, logs, *KINDS[kind], name=f"plain-{kind}")
    frontend = start_frontend(f"frontend-{kind}", cards, logs)
    try:
        wait_for_workers(frontend, [worker])
        plain.wait_for_status(200)
        router, direct = Endpoint(frontend.url), Endpoint(plain.url)
        yield PoolingLab(router, direct)
        router.close()
        direct.close()
    finally:
        let_go(frontend, worker, plain)


def of(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("lab", [kind], indirect=True, scope="module")


def shown(name: str, text: str = "What is this?") -> dict[str, Any]:
    content = [image(data_uri(picture(f"pooled-{name}"))), words(text)]
    return {"messages": [{"role": "user", "content": content}]}


@of("embed")
def test_embeddings(lab: PoolingLab) -> None:
    answer = lab.ask("/v1/embeddings", input=["a red circle", "a blue triangle"])
    one, other = (each["embedding"] for each in answer["data"])
    assert one != other
    lab.ask("/v1/embeddings", input=[[1, 2, 3], [4, 5]])
    lab.ask("/v1/embeddings", input="a red circle", encoding_format="base64")
    lab.ask("/v2/embed", texts=["a", "b"], input_type="search_query", embedding_types=["float"])
    lab.ask("/pooling", input="a red circle")
    lab.ask("/invocations", input="a red circle")


@of("embed")
def test_embeddings_of_pictures(lab: PoolingLab) -> None:
    before = hf_runs(lab.router)
    one = lab.ask("/v1/embeddings", **shown("one"))
    (moved,) = lab.decision(one)["media"]
    assert (moved["how"], moved["transport"]) == ("shipped", "shm")
    other = lab.ask("/v1/embeddings", **shown("other"))
    assert one["data"] != other["data"]
    again = lab.ask("/v1/embeddings", **shown("one", "And what is it now?"))
    (moved,) = lab.decision(again)["media"]
    assert moved["how"] == "held"
    after = hf_runs(lab.router)
    assert after["frontend"] - before["frontend"] == 2
    assert after["worker"] == before["worker"]


@of("embed")
def test_a_prefix_that_is_cached_is_predicted(lab: PoolingLab) -> None:
    lab.ask("/v1/embeddings", input=LONG + "first")
    again = lab.ask("/v1/embeddings", input=LONG + "second")
    decision = lab.decision(again)
    assert decision["predicted_cached_tokens"] > 0
    assert decision["realised_cached_tokens"] == decision["predicted_cached_tokens"]


@of("embed")
def test_scores_of_vectors(lab: PoolingLab) -> None:
    lab.ask("/score", queries="a circle", documents=["a circle", "the weather"])
    lab.ask("/v1/score", text_1="a circle", text_2="a triangle")
    lab.ask("/rerank", query="a circle", documents=["the weather", "a circle"], top_n=1)
    drawn = {"content": shown("scored")["messages"][0]["content"][:1]}
    lab.ask("/score", queries="a circle", documents=[drawn, "a circle"])


@of("embed")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/classify", {"input": "hello"}),
        ("/pooling", {"input": "hello", "task": "classify"}),
        ("/pooling", {"input": "hello", "task": "no-such-task"}),
        ("/v1/embeddings", {"input": "hello", "model": "other"}),
        ("/v1/embeddings", {"input": "hello " * 9000}),
        ("/v1/embeddings", {"input": "hello", "dimensions": 5}),
    ],
)
def test_what_it_does_not_do(lab: PoolingLab, path: str, body: dict[str, Any]) -> None:
    lab.ask(path, **body)


@of("tokens")
def test_a_vector_for_each_token(lab: PoolingLab) -> None:
    """As models of rewards and of late interaction give them."""
    answer = lab.ask("/pooling", input="a red circle")
    assert len(answer["data"][0]["data"]) == answer["usage"]["prompt_tokens"]
    one = lab.ask("/pooling", **shown("tokens"))
    assert len(one["data"][0]["data"]) == one["usage"]["prompt_tokens"]
    (moved,) = lab.decision(one)["media"]
    assert (moved["how"], moved["transport"]) == ("shipped", "shm")
    assert one["data"] != lab.ask("/pooling", **shown("others"))["data"]
    lab.ask("/score", queries="a circle", documents=["a circle", "the weather"])
    lab.ask("/v1/embeddings", input="a red circle")


@of("rerank")
def test_pairs_are_ranked(lab: PoolingLab) -> None:
    lab.ask("/classify", input=["a circle", "a triangle"])
    lab.ask("/score", queries="a circle", documents=["a circle", "the weather today"])
    ranked = lab.ask("/rerank", query="a circle", documents=["the weather", "a circle", "no"])
    assert len({result["relevance_score"] for result in ranked["results"]}) == 3
    drawn = [{"content": shown(name)["messages"][0]["content"][:1]} for name in ("a", "b")]
    ranked = lab.ask("/v1/rerank", query="a circle", documents=drawn)
    assert len({result["relevance_score"] for result in ranked["results"]}) == 2


@of("rerank")
def test_a_query_that_leaves_a_document_no_room_is_a_400(lab: PoolingLab) -> None:
    asked = {"model": "demo", "query": "<|im_start|>" * 20_000, "documents": ["a circle"]}
    answer = lab.router.http.post("/rerank", json=asked | {"max_tokens_per_doc": 256})
    assert answer.status_code == 400, answer.text
    assert "the query leaves no room" in answer.json()["error"]["message"], answer.text


@of("rerank")
def test_a_query_counts_with_each_of_its_documents(lab: PoolingLab) -> None:
    """18 KB of a request took an engine 40 seconds."""
    asked = {"model": "demo", "query": "a " * 4000, "documents": ["b"] * 1000}
    answer = lab.router.http.post("/rerank", json=asked)
    assert answer.status_code == 400, answer.text
    assert "send several requests" in answer.json()["error"]["message"], answer.text
