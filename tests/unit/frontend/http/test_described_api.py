"""What clients read of the API is made once, and while others are served."""

import asyncio
import threading
from typing import Any

import httpx
from fastapi import FastAPI

from frontend.http.server.serving_threads import describe_aside


async def test_it_is_made_while_others_are_served() -> None:
    app, served = FastAPI(), threading.Event()
    others_were_served: list[bool] = []
    make = app.openapi

    @app.get("/other")
    async def other() -> str:
        served.set()
        return "served"

    def slow() -> dict[str, Any]:
        if app.openapi_schema is None:
            others_were_served.append(served.wait(30))
        return make()

    app.openapi = slow  # type: ignore[method-assign]
    describe_aside(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        asked = [asyncio.create_task(http.get("/openapi.json")) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await http.get("/other")).json() == "served"
        pages = await asyncio.gather(*asked)
        wrong = await http.post("/openapi.json")
    assert others_were_served == [True]
    assert all("/other" in page.json()["paths"] for page in pages)
    assert wrong.status_code == 405


def test_there_may_be_none() -> None:
    describe_aside(FastAPI(openapi_url=None))
