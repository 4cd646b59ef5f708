"""The page for people: open to all, since it says nothing by itself. In a browser it runs in
``tests/e2e/test_status_page.py``.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from frontend.asgi import Door
from frontend.http import AdminGuard, page_routes
from frontend.http.access.api_keys import Keys
from frontend.http.operator import app as operator_app
from frontend.http.operator.app import PAGE
from frontend.http.operator.history import STEP_S, STEPS
from frontend.router.selection.costs import Costs

NODE = shutil.which("node")

DRAW = """
const [script, wrong, history] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const element = () => new Proxy(Object.assign(() => {}, { append() {}, setAttribute() {} }), {
  get: (held, name) => (name in held ? held[name] : element()), set: () => true,
  apply: () => element(),
});
class Clock extends Date { static now() { return wrong; } }
const context = {
  document: element(), sessionStorage: { getItem: () => "" }, fetch: () => new Promise(() => {}),
  setTimeout() {}, clearTimeout() {}, Date: Clock, history, drawn: null,
};
const vm = require("vm");
vm.runInNewContext(script + `
plot = (title, latest, show, lines) => drawnPlots.push([title, latest, lines.map((one) => one[1])]);
drawNow = () => 0;
const drawnPlots = [];
drawPlots(history, [0.5, 1]);
drawn = JSON.stringify(drawnPlots);`, context);
console.log(context.drawn);
"""
"""Draws plots with the page's own script, in a browser's place whose clock is wrong."""


def client(root_path: str = "") -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(page_routes())
    guarded = Door(app, [AdminGuard(Keys(["user"]), Keys(["admin"]))], root_path=root_path)
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
    urls = re.findall(r'(?:json|get|post)\(["`]([^"`]*)["`]\)', js)
    assert len(urls) == 8 and not any(url.startswith(("/", "http")) for url in urls)
    assert "url(" not in css and "@import" not in css


async def test_every_part_of_a_cost_has_a_color_and_a_word() -> None:
    async with client() as http:
        html, css, js = [(await http.get(path)).text for path in sorted(PAGE)]
    for part in Costs._fields:
        assert css.count(f"--{part}: ") == 2, "light and dark"
        assert f"i.{part}, " in css and f'<span class="{part}">' in html and f"{part}: " in js


async def test_names_are_put_in_as_text_only() -> None:
    async with client() as http:
        js = (await http.get("/status/status.js")).text
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in js


@pytest.mark.skipif(NODE is None, reason="runs the page's script: install Node.js")
@pytest.mark.parametrize("wrong_by", [-86_400, 0, 86_400])
def test_plots_end_with_the_servers_last_step_whatever_the_browsers_clock_says(
    wrong_by: int,
) -> None:
    end = 1_700_000_000
    none = dict.fromkeys(
        ("status_429", "status_503", "status_4xx", "status_5xx", "broken", "output_tokens",
         "prompt_tokens", "predicted", "realised"), 0,
    )  # fmt: skip
    history = [
        none | {"at": at, "ok": ok, "status_429": 4, "first_token_within": within}
        # One was lost between the two, as where a process hung.
        for at, ok, within in ((end - 2 * STEP_S, 16, [0, 0, 0]), (end, 46, [2, 3, 4]))
    ]
    script = Path(operator_app.__file__).with_name("page") / "status.js"
    given = json.dumps([script.read_text(), 1000 * (end + wrong_by), history])
    done = subprocess.run(
        [str(NODE), "-e", DRAW], input=given, capture_output=True, text=True, check=True
    )
    plots = json.loads(done.stdout)
    assert len(plots) == 5
    title, latest, (requests,) = plots[0]
    assert (title, latest) == ("Requests per second", "3.5")
    assert requests == [None] * (STEPS - 3) + [2, None, 5]
    title, latest, (busy, *_) = plots[1]
    assert (title, latest, busy[-3:]) == ("Errors in 10 s", "8 in a minute", [4, None, 4])
    # As a histogram says it: half of four within the first edge, the last beyond all edges.
    title, latest, (p50, p99) = plots[2]
    assert (title, latest) == ("First token", "p50 500 ms, p99 1 s")
    assert (p50[-3:], p99[-3:]) == ([None, None, 0.5], [None, None, 1])
