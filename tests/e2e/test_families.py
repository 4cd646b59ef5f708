"""Every kind of media through the same path, for models that are unlike the demo model.

One family after the other, for the sake of memory. Every answer is compared with what a
plain vLLM gives to the same request.
"""

import base64
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import odd_media, recordings
from tests.clips import data_url, film, sound
from tests.demo_model import shared_demo_model
from tests.e2e import odd
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.lab import WAYS, Lab, ask, image, text, words
from tests.e2e.odd import compare
from tests.e2e.processes import (
    START_TIMEOUT_S,
    Process,
    start_frontend,
    start_plain_vllm,
    start_worker,
)
from tests.families import adapters
from tests.pictures import data_uri, picture

FLAGS = ['--limit-mm-per-prompt={"image": 6, "video": 3, "audio": 3}']
MORE_FLAGS = {"idefics3": adapters.FLAGS}
WITH_SOUND: dict[str, Any] = {"mm_processor_kwargs": {"use_audio_in_video": True}}


@dataclass(frozen=True)
class FamilyLab(Lab):
    """A frontend over one worker, and a plain vLLM, of one family."""

    family: str

    @property
    def ways(self) -> set[str]:
        """A video with its sound can't be processed from its encoded bytes alone."""
        return {self.way, "inline"} if self.way == "reference" else {self.way}

    def shown(self, name: str, size: tuple[int, int] = (224, 224)) -> dict[str, Any]:
        return image(data_uri(picture(f"{self.way}-{name}", size)))

    def heard(self, name: str, seconds: float = 1.0) -> dict[str, Any]:
        url = data_url("audio/wav", sound(f"{self.way}-{name}", seconds))
        return {"type": "audio_url", "audio_url": {"url": url}}

    def seen(self, name: str, *, audible: bool = False) -> dict[str, Any]:
        url = data_url("video/mp4", film(f"{self.way}-{name}", audible=audible))
        return {"type": "video_url", "video_url": {"url": url}}


class Engines:
    """A worker and a plain vLLM of the family that was asked for last."""

    def __init__(self, made: Callable[[str], Path], directory: Path, let_go: LetGo) -> None:
        self.directory = directory
        self._made = made
        self._let_go = let_go
        self._family = ""
        self._started: list[Process] = []

    def of(self, family: str) -> tuple[Process, Endpoint]:
        if family != self._family:
            self.stop()
            self._model = model = self._made(family)
            flags = (*FLAGS, *MORE_FLAGS.get(family, ()))
            self.worker = start_worker(
                family, model, self.cards(family), self.directory, *flags, env=adapters.ALLOWED
            )
            self._started.append(self.worker)
            plain = start_plain_vllm(
                model, self.directory, *flags, name=f"plain-{family}", env=adapters.ALLOWED
            )
            self._started.append(plain)
            plain.wait_for_status(200)
            self.plain = Endpoint(plain.url)
            self._family = family
        return self.worker, self.plain

    def another(self, worker_id: str, *more: str) -> Process:
        """One more worker of the family."""
        flags = (*FLAGS, *MORE_FLAGS.get(self._family, ()), *more)
        cards = self.cards(self._family)
        return start_worker(worker_id, self._model, cards, self.directory, *flags)

    def cards(self, family: str) -> Path:
        return self.directory / f"cards-{family}"

    def stop(self) -> None:
        if self._family:
            self.plain.close()
        self._let_go(*self._started)
        self._started.clear()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Engines]:
    made = partial(shared_demo_model, tmp_path_factory)
    engines = Engines(made, tmp_path_factory.mktemp("families"), let_go)
    yield engines
    engines.stop()


@pytest.fixture(scope="module")
def lab(
    request: pytest.FixtureRequest, engines: Engines, pictures_url: str, let_go: LetGo
) -> Iterator[FamilyLab]:
    """A frontend over a family's worker, whose media travel in one way."""
    family, way = request.param
    worker, plain = engines.of(family)
    flags, env = WAYS[way]
    name = f"frontend-{family}-{way}"
    env = {**env, **adapters.ALLOWED}
    frontend = start_frontend(name, engines.cards(family), engines.directory, *flags, env=env)
    try:
        wait_for_workers(frontend, [worker])
        router = Endpoint(frontend.url)
        yield FamilyLab(way, router, plain, pictures_url, family)
        router.close()
    finally:
        let_go(frontend)


Request = Callable[[FamilyLab], list[dict[str, Any]]]
WHAT = words("What is this?")

IMAGES: dict[str, Request] = {
    "image": lambda lab: [lab.shown("one"), WHAT],
    "images": lambda lab: [lab.shown("a"), words("and"), lab.shown("b"), lab.shown("c"), WHAT],
    "the same image twice": lambda lab: [lab.shown("t"), lab.shown("u"), lab.shown("t"), WHAT],
    "odd sizes": lambda lab: [lab.shown("w", (600, 40)), lab.shown("x", (30, 300)), WHAT],
}
EVERYTHING: dict[str, Request] = {
    "video": lambda lab: [lab.seen("one"), WHAT],
    "videos": lambda lab: [lab.seen("a"), words("and"), lab.seen("b"), WHAT],
    "audio": lambda lab: [lab.heard("one"), WHAT],
    "audio clips": lambda lab: [lab.heard("a"), words("and"), lab.heard("b", 2.5), WHAT],
    "mixed": lambda lab: [
        lab.seen("m"), lab.heard("m"), lab.shown("m"), words("and"),
        lab.heard("n"), lab.shown("n"), lab.seen("n"), lab.heard("m"), WHAT,
    ],
}  # fmt: skip
AUDIBLE: dict[str, Request] = {
    "sound in a video": lambda lab: [lab.seen("s", audible=True), WHAT],
    "sound in videos among images": lambda lab: [
        lab.shown("s"), lab.seen("s1", audible=True), words("and"), lab.shown("s2"),
        lab.seen("s2", audible=True), WHAT,
    ],
}  # fmt: skip

OMNI, IDEFICS = "qwen2.5-omni", "idefics3"
KINDS: dict[tuple[str, str], Iterable[str]] = {
    (OMNI, "shm"): IMAGES | EVERYTHING | AUDIBLE,
    (OMNI, "nixl"): ["mixed"],
    (OMNI, "reference"): ["mixed", "sound in a video"],
    (IDEFICS, "shm"): IMAGES,
    (IDEFICS, "reference"): ["images"],
}
"""What is asked of which family, by which way its media travel."""


def of(*labs: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test on these. Of the module's scope, or each test would get a new frontend."""
    return pytest.mark.parametrize("lab", labs, indirect=True, scope="module", ids="-".join)


@of(*KINDS)
def test_media_are_processed_once_and_sent_once(lab: FamilyLab, subtests: pytest.Subtests) -> None:
    """``ask`` compares with plain vLLM and checks how the media travelled."""
    for kind in KINDS[lab.family, lab.way]:
        with subtests.test(kind):
            ask_twice(lab, kind)


def ask_twice(lab: FamilyLab, kind: str) -> None:
    content = (IMAGES | EVERYTHING | AUDIBLE)[kind](lab)
    options = WITH_SOUND if kind in AUDIBLE else {}
    items = {str(part) for part in content if part["type"] != "text"}
    sounds = sum("video" in part for part in items) if kind in AUDIBLE else 0
    first = lab.ask(*content, **options)
    assert len(first.shipped) == len(items) + sounds
    assert first.hf_runs["frontend"] > 0
    again = lab.ask(*content, **options)
    assert again.shipped == []
    assert again.hf_runs == {"frontend": 0, "worker": 0}
    assert again.cached == again.decision["predicted_cached_tokens"]
    assert again.cached > 0


@of((OMNI, "shm"), (IDEFICS, "shm"))
def test_another_medium_gets_another_answer(lab: FamilyLab) -> None:
    kinds: list[Callable[[str], dict[str, Any]]]
    kinds = [lab.shown, lab.heard, lab.seen] if lab.family == OMNI else [lab.shown]
    for kind in kinds:
        one, other = lab.ask(kind("this"), WHAT), lab.ask(kind("that"), WHAT)
        assert text(one.response) != text(other.response)


@of((OMNI, "shm"))
@pytest.mark.parametrize("name", odd_media.AUDIO)
def test_odd_audio(lab: FamilyLab, name: str) -> None:
    url = data_url("audio/wav", odd_media.AUDIO[name]())
    compare(lab.router, lab.plain, {"type": "audio_url", "audio_url": {"url": url}})


@of((OMNI, "shm"))
def test_sounds_of_every_rate_and_format(lab: FamilyLab, subtests: pytest.Subtests) -> None:
    for name, rate, channels in recordings.cells():
        format = recordings.FORMATS[name]
        clip = recordings.recording(f"{name} {channels}", format, rate, channels)
        with subtests.test(f"{name} of {rate} Hz, {recordings.LAYOUTS[channels]}"):
            part = said(clip, format) if channels == 1 else linked(clip, format)
            assert compare(lab.router, lab.plain, part).status_code == 200


def said(clip: bytes, format: recordings.Format) -> dict[str, Any]:
    content = {"data": base64.b64encode(clip).decode(), "format": format.suffix}
    return {"type": "input_audio", "input_audio": content}


def linked(clip: bytes, format: recordings.Format) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(format.media_type, clip)}}


@of((OMNI, "shm"))
def test_the_example_of_the_docs(lab: FamilyLab, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "films-and-sounds.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    mp3 = recordings.recording("docs", recordings.FORMATS["MP3"], 44_100, 1)
    for name, data in {
        "clip.mp4": film("docs"),
        "talk.mp3": mp3,
        "talk.wav": sound("docs"),
    }.items():
        (tmp_path / name).write_bytes(data)
    model = lab.router.openai.models.list().data[0].id
    example = example.replace("http://127.0.0.1:8000", lab.router.url).replace(
        '"demo"', repr(model)
    )
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@of((OMNI, "shm"))
def test_a_limit_for_each_kind(lab: FamilyLab) -> None:
    """As many as the card of the worker says, each kind by itself."""
    for part in (lab.heard("many"), lab.seen("many")):
        reply = compare(lab.router, lab.plain, *[part] * 4)
        assert reply.status_code == 400
        assert "3 " in reply.text


@of((OMNI, "shm"))
def test_a_name_is_of_one_kind(lab: FamilyLab) -> None:
    """In plain vLLM the sound would be taken for the picture, and break."""
    name = {"uuid": "one name"}
    named = [lab.shown("uuid") | name, lab.heard("uuid") | name, WHAT]
    nameless = [lab.shown("uuid"), lab.heard("uuid"), WHAT]
    assert text(ask(lab.router, named)) == text(ask(lab.plain, nameless))


@of((OMNI, "shm"))
def test_a_film_with_its_sound_is_shown(lab: FamilyLab) -> None:
    """Its name brought the pictures alone, which ended the engine."""
    name = {"uuid": "a film with its sound"}
    film = lab.seen("named", audible=True) | name
    assert odd.ask(lab.router, film, **WITH_SOUND).status_code == 200
    by_name = {"type": "video_url", "video_url": None} | name
    for others in ([], [lab.heard("beside a name")]):
        reply = odd.ask(lab.router, by_name, *others, **WITH_SOUND)
        assert reply.status_code == 400, reply.text
    assert odd.ask(lab.router, film, **WITH_SOUND).status_code == 200


@of((OMNI, "shm"))
def test_films_of_the_same_sound(lab: FamilyLab) -> None:
    """The second was a 400: its sound was kept, and vLLM processes no film without one."""
    one, other = (film(name, audible=True, heard="same") for name in ("one", "other"))
    for data in (one, other, one):
        shown = {"type": "video_url", "video_url": {"url": data_url("video/mp4", data)}}
        assert odd.ask(lab.router, shown, **WITH_SOUND).status_code == 200


@of((IDEFICS, "shm"))
def test_a_medium_that_it_does_not_take(lab: FamilyLab) -> None:
    for part in (lab.heard("not taken"), lab.seen("not taken")):
        ours, theirs = (odd.ask(each, part) for each in (lab.router, lab.plain))
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        assert ours.status_code == 400


@of((IDEFICS, "shm"))
def test_an_adapter_comes_and_goes_while_a_worker_serves(lab: FamilyLab, tmp_path: Path) -> None:
    """Under the very routes that a plain vLLM has, with its answers."""
    path = str(adapters.write_adapter(tmp_path / "ode", "model.text_model.layers"))
    content = [lab.shown("ode"), WHAT]
    base = text(lab.ask(*content).response)

    def both(route: str, status: int, **fields: object) -> None:
        answers = [each.http.post(route, json=fields) for each in (lab.router, lab.plain)]
        ours, theirs = answers
        assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text)
        assert ours.status_code == status

    asked = {"model": "ode", "messages": [{"role": "user", "content": "x"}]}
    both("/v1/chat/completions", 404, **asked)
    both("/v1/load_lora_adapter", 200, lora_name="ode", lora_path=path)
    wait_for_models(lab.router, ["demo", "ode"])
    wait_for_models(lab.plain, ["demo", "ode"])
    first = lab.ask(*content, model="ode")
    assert text(first.response) != base
    again = lab.ask(*content, model="ode")
    assert again.cached == again.decision["predicted_cached_tokens"]
    assert again.cached > 0
    assert text(lab.ask(*content).response) == base
    both("/v1/unload_lora_adapter", 200, lora_name="ode")
    wait_for_models(lab.router, ["demo"])
    both("/v1/chat/completions", 404, **asked)


@of((IDEFICS, "shm"))
def test_a_request_for_an_adapter_goes_to_the_worker_that_has_it(
    lab: FamilyLab, engines: Engines, tmp_path: Path, let_go: LetGo
) -> None:
    path = str(adapters.write_adapter(tmp_path / "tale", "model.text_model.layers", seed=2))
    other = engines.another("teller", "--lora-modules", f"tale={path}")
    try:
        wait_for_models(lab.router, ["demo", "tale"])
        fields = {"lora_name": "tale", "lora_path": path}
        assert lab.plain.http.post("/v1/load_lora_adapter", json=fields).status_code == 200
        first = lab.ask(lab.shown("tale"), WHAT, model="tale")
        assert first.decision["worker_id"] == "teller"
        again = lab.ask(lab.shown("tale"), WHAT, model="tale")
        assert again.cached == again.decision["predicted_cached_tokens"]
        assert again.cached > 0
        done = lab.router.http.post("/mmrouter/workers/teller/drain")
        assert done.status_code == 200, done.text
        asked = {"model": "tale", "messages": [{"role": "user", "content": "x"}]}
        refused = lab.router.http.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 503, refused.text
        answer = lab.plain.http.post("/v1/unload_lora_adapter", json={"lora_name": "tale"})
        assert answer.status_code == 200, answer.text
    finally:
        let_go(other)
    wait_for_models(lab.router, ["demo"])


def wait_for_models(endpoint: Endpoint, names: list[str]) -> None:
    """Workers tell frontends a moment later."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := [each.id for each in endpoint.openai.models.list()]) != names:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
