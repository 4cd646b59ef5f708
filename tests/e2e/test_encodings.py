"""A worker whose engine keeps encodings of media in a connector of vLLM's, beyond its own cache."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import lab
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.processes import start_frontend, start_worker
from tests.pictures import data_uri, picture

LARGE = (896, 896)
"""Three of these are more than the engine's encoder cache has room for."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where encodings are: a folder for each medium."""
    return tmp_path_factory.mktemp("encodings")


@pytest.fixture(scope="module")
def keeping(
    model: Path, storage: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Endpoint]:
    """A frontend over the worker."""
    directory = tmp_path_factory.mktemp("keeping")
    connector = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    flag = f"--ec-transfer-config={json.dumps(connector)}"
    cards = directory / "cards"
    worker = start_worker("keeping", model, cards, directory, flag)
    frontend = start_frontend("keeping-frontend", cards, directory)
    try:
        wait_for_workers(frontend, [worker])
        endpoint = Endpoint(frontend.url)
        yield endpoint
        endpoint.close()
    finally:
        let_go(frontend, worker)


def large(name: str) -> dict[str, Any]:
    return lab.image(data_uri(picture(f"encoding-{name}", LARGE)))


def kept(storage: Path) -> set[Path]:
    return set(storage.glob("*/encoder_cache.safetensors"))


def test_pictures_that_left_the_encoder_cache_are_not_encoded_again(
    keeping: Endpoint, plain: Endpoint, storage: Path
) -> None:
    """What the first one's encoding is replaced by comes out: so it is what was used."""
    asked = [large("one")]
    first = lab.ask(keeping, asked)
    assert lab.text(first) == lab.text(lab.ask(plain, asked))
    (of_one,) = kept(storage)
    texts: dict[str, str] = {}
    for name in ("other", "third", "fourth"):
        # Behind a text, so that no prompt begins as another one did.
        asked = [lab.words(f"Look at {name}: "), large(name)]
        texts[name] = lab.text(lab.ask(keeping, asked))
        assert texts[name] == lab.text(lab.ask(plain, asked))
        if name == "other":
            (of_other,) = kept(storage) - {of_one}
    assert len(kept(storage)) == 4
    shutil.copy(of_other, of_one)
    question = lab.words("Look at other: ")
    planted = lab.ask(keeping, [lab.words("Now. "), question, large("one")])
    as_other = lab.ask(keeping, [lab.words("Now. "), question, large("other")])
    honest = lab.ask(plain, [lab.words("Now. "), question, large("one")])
    assert lab.text(planted) == lab.text(as_other) != lab.text(honest)


def test_a_client_does_not_say_where_encodings_are(keeping: Endpoint, plain: Endpoint) -> None:
    there = {"anything": {"peer_host": "127.0.0.1", "peer_port": 9, "size_bytes": 1, "shape": [1]}}
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [large("elsewhere")]}],
        "max_tokens": 4,
        "temperature": 0,
        "ec_transfer_params": there,
    }
    ours, theirs = (each.http.post("/v1/chat/completions", json=body) for each in (keeping, plain))
    assert ours.status_code == theirs.status_code == 200
    assert ours.json()["choices"] == theirs.json()["choices"]
    assert not ours.json().get("ec_transfer_params")
