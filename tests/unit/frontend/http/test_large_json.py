import json
import math
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request

from frontend.http import large_json

PAD = "x" * large_json.LARGE


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(Request, "json", Request.json)  # put back afterwards
    large_json.install()
    app = FastAPI()

    @app.post("/echo")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in body.items() if key != "pad"}

    return TestClient(app)


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "large"])
def test_both_parsers_give_the_same(client: TestClient, pad: str) -> None:
    value = {"text": "naïve \u2028 \U0001f600", "number": 1.5, "big": 2**70, "none": None, "l": [1]}
    reply = client.post("/echo", json=value | {"pad": pad})
    assert reply.json() == value


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "large"])
def test_what_is_no_json_is_told_as_before(client: TestClient, pad: str) -> None:
    reply = client.post(
        "/echo", content=f'{{"pad": "{pad}", "a": }}', headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["type"] == "json_invalid"


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "large"])
def test_what_only_python_takes_is_taken(pad: str) -> None:
    assert math.isnan(large_json.parse(f'{{"pad": "{pad}", "a": NaN}}'.encode())["a"])
    with pytest.raises(json.JSONDecodeError):
        large_json.parse(f'"{pad}'.encode())
