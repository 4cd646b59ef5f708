"""Whisper: the words that a plain vLLM writes down, whole and as they come."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clips import film, floats, sound
from tests.e2e.conftest import Endpoint, LetGo
from tests.e2e.lab import hf_runs, leased
from tests.e2e.processes import start_frontend, start_plain_vllm, start_worker
from tests.families.stack import make_model
from tests.recordings import FORMATS, rates_of, recording

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
WEIGHTS = "--load-format=sharded_state"
SHORT = {"max_completion_tokens": "8"}


@dataclass(frozen=True)
class SpeechLab:
    """A frontend over one worker, and a plain vLLM, of a tiny Whisper."""

    router: Endpoint
    plain: Endpoint

    def post(self, path: str, clip: bytes, **fields: Any) -> tuple[httpx.Response, httpx.Response]:
        fields = {**SHORT, "model": "demo", "language": "en", "temperature": "0"} | fields
        fields = {name: value for name, value in fields.items() if value is not None}
        answers = [
            endpoint.http.post(path, data=fields, files={"file": ("a.wav", clip)})
            for endpoint in (self.router, self.plain)
        ]
        return answers[0], answers[1]

    def ask(self, path: str, clip: bytes, **fields: Any) -> dict[str, Any]:
        """Our answer, once it is plain vLLM's."""
        ours, theirs = self.post(path, clip, **fields)
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        return dict(ours.json())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[SpeechLab]:
    logs, cards = tmp_path_factory.mktemp("speech"), tmp_path_factory.mktemp("cards")
    model = make_model("whisper", logs, logs)
    worker = start_worker("speech-worker", model, cards, logs, WEIGHTS)
    frontend = start_frontend("speech", cards, logs)
    plain = start_plain_vllm(model, logs, WEIGHTS, name="plain-speech")
    try:
        frontend.wait_for_status(200)
        plain.wait_for_status(200)
        lab = SpeechLab(Endpoint(frontend.url), Endpoint(plain.url))
        yield lab
        lab.router.close()
        lab.plain.close()
    finally:
        let_go(worker, frontend, plain)


@pytest.mark.parametrize("path", [TRANSCRIBE, TRANSLATE])
def test_words_are_those_of_a_plain_vllm(lab: SpeechLab, path: str) -> None:
    before = hf_runs(lab.router)
    one, other = (lab.ask(path, sound(f"{path}-{name}")) for name in "ab")
    assert one["text"] and one["text"] != other["text"]
    assert lab.ask(path, sound(f"{path}-a")) == one
    in_pieces = lab.ask(path, sound(f"{path}-long", 40.0))
    assert in_pieces["text"] != one["text"]
    after = hf_runs(lab.router)
    assert after["frontend"] > before["frontend"]
    assert after["worker"] == before["worker"] == 0
    assert leased(lab.router) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_sounds_of_every_rate_and_format(
    lab: SpeechLab, name: str, subtests: pytest.Subtests
) -> None:
    """Whisper hears 16,000 samples a second."""
    path = (TRANSCRIBE, TRANSLATE)[len(name) % 2]
    texts = set()
    for rate in rates_of(name):
        with subtests.test(f"{rate} Hz"):
            texts.add(lab.ask(path, recording(f"{name} {rate}", FORMATS[name], rate, 2))["text"])
    assert len(texts) > 1
    assert leased(lab.router) == 0


def test_a_language_is_found_in_the_sound(lab: SpeechLab) -> None:
    assert lab.ask(TRANSCRIBE, sound("language"), language=None)["text"]


def test_they_come_as_a_stream(lab: SpeechLab) -> None:
    ours, theirs = (said(each) for each in lab.post(TRANSCRIBE, sound("stream"), stream="true"))
    assert ours == theirs
    assert ours[0] and ours[1] == "length"


def said(answer: httpx.Response) -> tuple[str, str]:
    """The text of a stream, and why it ends."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    words = [choice["delta"].get("content") or "" for choice in choices]
    return "".join(words), choices[-1].get("finish_reason") or ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": b"no sound"},
        {"clip": b""},
        {"clip": film("silent")},
        {"model": "nobody"},
        {"language": "tlh"},
        {"response_format": "smoke"},
        {"temperature": "-1"},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_what_is_wrong_is_named(lab: SpeechLab, wrong: dict[str, Any]) -> None:
    """In vLLM's words, but for sounds that can't be decoded: decoders are ours."""
    clip = wrong.pop("clip", None)
    ours, theirs = lab.post(TRANSCRIBE, sound("wrong") if clip is None else clip, **wrong)
    assert 400 <= ours.status_code < 500, ours.text
    assert ours.json()["error"]["message"]
    if clip is None:
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
    assert leased(lab.router) == 0


@pytest.mark.parametrize("sample", [np.nan, np.inf, -3e38, 1e17])
def test_a_sound_of_no_numbers_spoils_no_other_answer(lab: SpeechLab, sample: float) -> None:
    """NaN stayed in blocks of the KV cache that the next request got."""
    honest, odd = sound("honest"), floats(np.full(16_000, sample, np.float32))
    before = lab.ask(TRANSCRIBE, honest)
    ours = lab.router.http.post(TRANSCRIBE, data={"model": "demo"}, files={"file": ("a.wav", odd)})
    assert ours.status_code == 400, ours.text
    assert "no numbers" in ours.json()["error"]["message"]
    assert lab.ask(TRANSCRIBE, honest) == before


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions", "/v1/completions"])
def test_what_it_is_not_for(lab: SpeechLab, path: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "demo", "input": "a", "prompt": "a", "messages": messages, "max_tokens": 2}
    answers = [each.http.post(path, json=body) for each in (lab.router, lab.plain)]
    ours, theirs = answers
    assert ours.status_code == theirs.status_code, ours.text
    if theirs.json() == {"detail": "Not Found"}:
        assert f"There is no POST {path}" in ours.json()["error"]["message"]
    elif ours.status_code != 200:
        assert ours.json() == theirs.json()
