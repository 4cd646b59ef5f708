"""The page for people: open to all, since it says nothing by itself. In a browser it runs in
``tests/e2e/test_status_page.py``.
"""

import re

import httpx
import pytest
from fastapi import FastAPI

from frontend.http import AdminGuard, page_routes
from frontend.http.status_page import PAGE


def client(root_path: str = "") -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(page_routes())
    guarded = AdminGuard(app, ["user"], ["admin"], root_path=root_path)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(guarded, root_path=root_path), base_url="http://frontend"
    )


@pytest.mark.parametrize("path", sorted(PAGE))
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_all_of_it_comes_without_a_key(path: str, method: str) -> None:
    async with client() as http:
        answer = await http.request(method, path)
        assert answer.status_code == 200
        assert bool(answer.content) == (method == "GET")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await http.post(path)).status_code in (401, 405)
        assert (await http.get("/status/other")).status_code == 401
        assert (await http.get("/mmrouter/workers")).status_code == 401


async def test_it_needs_nothing_from_elsewhere_and_works_behind_a_prefix() -> None:
    async with client() as http:
        html, css, js = [(await http.get(path)).text for path in sorted(PAGE)]
    named = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert {f"/{one}" for one in named} == PAGE - {"/status"}
    urls = re.findall(r'(?:json|get)\("([^"]*)"\)', js)
    assert len(urls) == 6 and not any(url.startswith(("/", "http")) for url in urls)
    assert "url(" not in css and "@import" not in css


async def test_names_are_put_in_as_text_only() -> None:
    async with client() as http:
        js = (await http.get("/status/status.js")).text
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in js
