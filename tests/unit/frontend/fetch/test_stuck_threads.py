"""A medium that a thread does not return from fails alone; the next ones are served."""

import asyncio
import gc
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.media import ImageMediaIO

from common.observability.watchdog import WATCHDOG
from frontend.fetch import loader as loader_module
from frontend.fetch.connector import FrontendMediaConnector
from frontend.fetch.content import Content
from tests.fakes.hanging import Hanging
from tests.pictures import data_uri, picture
from tests.unit.frontend.fetch.conftest import MakeLoader
from tests.waiting import until


@pytest.fixture(params=["decode", "read_data_url", "read_local_file"])
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    step = Hanging(getattr(loader_module, request.param))
    monkeypatch.setattr(loader_module, request.param, step)
    if request.param == "read_local_file":
        request.getfixturevalue("tmp_path").joinpath("a.png").write_bytes(picture("file"))
    yield step
    step.go.set()


def where(hanging: Hanging, request: pytest.FixtureRequest, name: str) -> str:
    if request.node.callspec.params["hanging"] == "read_local_file":
        return f"file://{request.getfixturevalue('tmp_path')}/a.png"
    return data_uri(picture(name))


async def test_it_fails_alone(
    make_loader: MakeLoader, hanging: Hanging, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue("tmp_path")
    connector = FrontendMediaConnector(make_loader(local_root=root))
    stuck = WATCHDOG.stuck
    with pytest.raises(GracefulHTTPError, match=r"media thread .* did not return") as caught:
        await connector.fetch_image_async(where(hanging, request, "bad"))
    assert caught.value.http_status is HTTPStatus.UNPROCESSABLE_ENTITY
    assert WATCHDOG.stuck == stuck + 1
    hanging.hangs = False
    assert await connector.fetch_image_async(where(hanging, request, "bad")), (
        "nothing is kept of it"
    )
    hanging.go.set()
    await until(lambda: WATCHDOG.stuck == stuck)


async def test_twenty_at_once(
    make_loader: MakeLoader, hanging: Hanging, request: pytest.FixtureRequest
) -> None:
    connector = FrontendMediaConnector(make_loader(local_root=request.getfixturevalue("tmp_path")))
    stuck = WATCHDOG.stuck
    places = [where(hanging, request, f"bad {number}") for number in range(20)]
    failed = await asyncio.gather(
        *(connector.fetch_image_async(place) for place in places), return_exceptions=True
    )
    assert all(isinstance(each, GracefulHTTPError) for each in failed)
    hanging.hangs = False
    assert await connector.fetch_image_async(where(hanging, request, "good"))
    hanging.go.set()
    await until(lambda: WATCHDOG.stuck == stuck)


async def test_who_leaves_meanwhile_leaves_nothing(
    make_loader: MakeLoader, hanging: Hanging, request: pytest.FixtureRequest
) -> None:
    loader = make_loader(local_root=request.getfixturevalue("tmp_path"))
    connector = FrontendMediaConnector(loader)
    stuck = WATCHDOG.stuck
    asking = asyncio.create_task(connector.fetch_image_async(where(hanging, request, "bad")))
    await until(lambda: hanging.asked)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: WATCHDOG.stuck > stuck)
    hanging.go.set()
    await until(lambda: WATCHDOG.stuck == stuck)
    del asking  # its error refers to the frames that hold the medium

    def is_free() -> bool:
        gc.collect()
        return (loader.budgets.decoding.reserved, loader.budgets.held.reserved) == (0, 0)

    await until(is_free)


async def test_a_large_picture_may_take_longer(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(loader_module, "allow", allowed.append)
    content = Content.of(picture("large", (1000, 1000)))
    assert await make_loader().decode(content, ImageMediaIO())
    assert sum(allowed) >= 0.25
