"""Odd pictures and videos, and what a request may say about its media."""

import base64
import io
from typing import Any

import pytest
import torch

from tests import odd_media
from tests.clips import data_url, film
from tests.e2e.conftest import Endpoint
from tests.e2e.lab import leased
from tests.e2e.odd import ask, compare
from tests.pictures import data_uri, picture

Part = dict[str, Any]


def image(url: str | None) -> Part:
    return {"type": "image_url", "image_url": None if url is None else {"url": url}}


def shown(name: str) -> Part:
    return image(data_uri(picture(name)))


def video(data: bytes) -> Part:
    return {"type": "video_url", "video_url": {"url": data_url("video/mp4", data)}}


@pytest.mark.parametrize("name", sorted(odd_media.IMAGES.keys() - odd_media.DEEP))
def test_odd_images(router: Endpoint, plain: Endpoint, name: str) -> None:
    compare(router, plain, image(data_url("image/png", odd_media.IMAGES[name]())))
    assert leased(router) == 0


@pytest.mark.parametrize("name", sorted(odd_media.DEEP))
def test_grey_of_16_bits_is_seen(router: Endpoint, plain: Endpoint, name: str) -> None:
    """Plain vLLM cuts it at 255, so that nearly all of it is white."""
    ours = answer(ask(router, image(data_url("image/png", odd_media.IMAGES[name]()))))
    scaled = odd_media.encoded(odd_media.scaled(odd_media.deep()), "PNG")
    assert ours == answer(ask(plain, image(data_url("image/png", scaled))))


@pytest.mark.parametrize("name", odd_media.VIDEOS)
def test_odd_videos(router: Endpoint, plain: Endpoint, name: str) -> None:
    compare(router, plain, video(odd_media.VIDEOS[name]()))
    assert leased(router) == 0


def named(part: Part, name: str) -> Part:
    return part | {"uuid": name}


def answer(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_name_stands_for_what_was_shown_under_it(router: Endpoint, plain: Endpoint) -> None:
    first = answer(compare(router, plain, named(shown("first"), "name")))
    assert first != answer(compare(router, plain, shown("second")))
    assert answer(compare(router, plain, named(image(None), "name"))) == first
    # vLLM doesn't look at what else comes under a name that it knows: here it would answer
    # to the first picture again.
    second = compare(router, plain, shown("second"))
    for again in (shown("second"), image(None)):
        assert answer(ask(router, named(again, "name"))) == answer(second)


def test_a_name_that_looks_like_the_hash_of_a_picture(router: Endpoint, plain: Endpoint) -> None:
    decision = router.decision(compare(router, plain, shown("hashed")).json()["id"])
    media: Any = decision["media"]
    reply = ask(router, named(image(None), media[0]["mm_hash"]))
    assert reply.status_code == 400


def test_a_name_that_nothing_was_shown_under(router: Endpoint, plain: Endpoint) -> None:
    reply = compare(router, plain, named(image(None), "unheard of"))
    assert reply.status_code == 400
    assert "nothing is kept under its uuid" in reply.text


def test_an_empty_name(router: Endpoint, plain: Endpoint) -> None:
    answer(compare(router, plain, named(shown("under an empty name"), "")))


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"max_pixels": 12544}},
        {"mm_processor_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 12544}}},
        {"mm_processor_kwargs": {"max_pixels": "many"}},
        {"mm_processor_kwargs": {"unknown": 1}},
        {"media_io_kwargs": {"image": {"image_mode": "L"}}},
        {"media_io_kwargs": {"image": {"image_mode": "nonsense"}}},
        {"media_io_kwargs": {"video": {"num_frames": 2}}},
        {"media_io_kwargs": {"video": {"num_frames": "x"}}},
    ],
    ids=str,
)
def test_options_of_processing(router: Endpoint, plain: Endpoint, options: Part) -> None:
    """And they are part of hashes: with options or without, each finds its own blocks."""
    parts = [shown("options"), video(film("options"))]
    for each in (options, {}, options):
        reply = compare(router, plain, *parts, **each)
        if reply.status_code == 200:
            decision = router.decision(reply.json()["id"])
            assert decision["predicted_cached_tokens"] == decision["realised_cached_tokens"]


def tensor(value: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def embeds(rows: int, width: int = 128, grid: tuple[int, ...] = (1, 8, 8)) -> Part:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    return {
        "type": "image_embeds",
        "image_embeds": {
            "image_embeds": tensor(values),
            "image_grid_thw": tensor(torch.tensor(grid)),
        },
    }


def test_embeddings_instead_of_a_picture(router: Endpoint, plain: Endpoint) -> None:
    answer(compare(router, plain, embeds(16)))
    answer(compare(router, plain, embeds(16), embeds(32, grid=(1, 8, 16))))


def test_broken_embeddings(router: Endpoint, plain: Endpoint) -> None:
    part = {"type": "image_embeds", "image_embeds": "AAAA"}
    assert compare(router, plain, part).status_code == 400


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (embeds(4), "4 embeddings for 16 placeholder tokens"),
        (embeds(15), "15 embeddings for 16 placeholder tokens"),
        (embeds(16, width=64), "64 wide"),
    ],
    ids=["few", "one too few", "narrow"],
)
def test_embeddings_that_would_end_an_engine(router: Endpoint, part: Part, reason: str) -> None:
    """Plain vLLM isn't asked: it would end."""
    body = {"model": "demo", "messages": [{"role": "user", "content": [part]}]}
    reply = router.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]
