"""Dashboard, rules and scrape file ask for what there is. With a Prometheus (Debian's package
``prometheus``) they are evaluated by it, against a frontend that serves."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import vllm.v1.metrics.loggers
import yaml
from prometheus_client import REGISTRY, generate_latest

from frontend.http.access.admin import is_for_admins
from setup.metrics_page import declared, with_table
from tests.deployment import DEPLOY
from tests.fakes.monitored import Monitored, monitored
from tests.ports import free_port

FOLDER = DEPLOY / "monitoring"
PAGE = DEPLOY.parents[1] / "docs" / "metrics.md"
AUTOSCALER = DEPLOY / "kubernetes" / "components" / "monitoring" / "autoscaler.yaml"

ADDED = {"job", "instance", "process", "le"}
"""Labels that Prometheus, histograms and several processes add."""

QUIET = {
    "KV events: age when applied",
    "KV events: gaps, losses, unreadable",
    "Retries and migrations",
    "Ejections",
    "Bytes sent by transport",
    "Fall-backs by reason",
    "Media by result",
    "What should stay at nothing",
}
"""Panels of what does not happen to text on scripted engines."""

METRICS = {metric.name: metric for metric in declared()}


class Expression(NamedTuple):
    """A query, and where it stands."""

    place: str
    text: str


@cache
def dashboard() -> Any:
    return json.loads((FOLDER / "dashboard.json").read_text())


@cache
def rules() -> list[Any]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> Iterator[Expression]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Expression(panel["title"], target["expr"])


def alerts() -> Iterator[Expression]:
    for rule in rules():
        yield Expression(rule.get("alert") or rule["record"], rule["expr"])


ALL = [*panels(), *alerts()]


def test_each_alert_has_a_runbook_and_no_other() -> None:
    page = PAGE.with_name("troubleshooting.md").read_text().partition("\n## Runbooks\n")[2]
    described = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(described) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:mmrouter|vllm)[_:][a-zA-Z0-9_:]*", expression))


def labels(expression: str) -> set[str]:
    found = set(re.findall(r"[{,] *(\w+) *(?:=~|!~|!=|=)", expression))
    for listed in re.findall(r"\b(?:by|ignoring|on|without) *\(([^)]*)\)", expression):
        found |= {name.strip() for name in listed.split(",")}
    return found


def base(name: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        short = name.removesuffix(suffix)
        if short != name and (short.startswith("vllm:") or short in METRICS):
            return short
    return name


def test_all_that_is_declared_is_served() -> None:
    page = generate_latest(REGISTRY).decode()
    for metric in METRICS.values():
        assert f"# TYPE {metric.name} {metric.type}\n" in page


@pytest.mark.parametrize("expression", ALL, ids=lambda each: each.place)
def test_metrics_and_labels_that_are_asked_for_exist(expression: Expression) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known: set[str] = set()
    for name in names(expression.text) - recorded:
        if name.startswith("vllm:"):
            source = Path(vllm.v1.metrics.loggers.__file__).read_text()
            assert f'"{base(name).removesuffix("_total")}"' in source
            known |= {"worker_id", "model_name", "engine"}
        else:
            known |= {*METRICS[base(name)].labels, "worker_id"}
    assert names(expression.text) or expression.text.startswith("up{")
    assert labels(expression.text) <= known | ADDED


def test_outcomes_and_reasons_that_are_asked_for_exist() -> None:
    """A class that is called otherwise would never raise an alert."""
    from common import errors  # only here

    asked = re.findall(r'outcome=~"([^"]+)"', (FOLDER / "rules.yml").read_text())
    classes = [name for name in vars(errors) if name.endswith("Error")]
    assert asked
    for pattern in asked:
        # Alternatives, of which some have alternatives in brackets.
        for one in re.split(r"\|(?![^(]*\))", pattern):
            assert any(re.fullmatch(one, name) for name in classes), one


def test_the_autoscalers_metric_exists() -> None:
    (name,) = names(AUTOSCALER.read_text()) & METRICS.keys()
    assert METRICS[name].type == "gauge"


def test_the_dashboard_is_one_grid() -> None:
    board = dashboard()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and all(x < 24 for x, _ in cells)
        taken |= cells
    source = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
    (variable,) = board["templating"]["list"]
    assert source == {"${" + variable["name"] + "}"}


def test_the_scrape_file_asks_for_pages_that_there_are() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    frontends, workers = config["scrape_configs"]
    assert config["rule_files"] == ["rules.yml"]
    assert "metrics_path" not in frontends and "authorization" not in frontends
    assert is_for_admins(workers["metrics_path"]) and "authorization" in workers


def test_every_alert_says_something() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"].endswith(".")


def test_the_page_has_every_metric() -> None:
    """``make docs`` makes it."""
    assert with_table(PAGE.read_text()) == PAGE.read_text()


async def page(frontend: Monitored, path: str) -> str:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.port}") as http:
        answer = await http.get(path, follow_redirects=True)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        return answer.text


async def test_pages_say_nothing_of_what_users_asked() -> None:
    async with monitored() as frontend:
        frontend.salt = "salt of a secret"
        before = await page(frontend, "/metrics")
        for _ in range(3):
            await frontend.ask("id of a secret")
        after = await page(frontend, "/metrics")
        assert "secret" not in after
        assert "secret" not in await page(frontend, "/mmrouter/workers/metrics")

    def moved(name: str) -> float:
        def total(text: str) -> float:
            lines = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)
            return sum(map(float, lines))

        return total(after) - total(before)

    assert moved("mmrouter_requests_total") == 3
    assert moved("mmrouter_request_seconds_count") == 3
    assert moved("mmrouter_time_to_first_token_seconds_count") == 3
    assert moved("mmrouter_inter_token_latency_seconds_count") == 3
    assert moved("mmrouter_prompt_tokens_total") == 120
    assert moved("mmrouter_realised_cached_tokens_total") == 9
    assert moved('mmrouter_stage_seconds_count{stage="match"}'.replace("{", r"\{")) == 3


# With a real Prometheus

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="there is no prometheus here: on Debian, apt-get install prometheus",
)


def configuration(folder: Path, port: int) -> Path:
    """The scrape file as it stands, but for addresses, the key's file and the times."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    key = folder / "admin.key"
    key.write_text("key")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        if "authorization" in job:
            job["authorization"]["credentials_file"] = str(key)
            job["scrape_interval"] = job["scrape_timeout"] = "1s"
    shutil.copy(FOLDER / "rules.yml", folder)
    written = folder / "prometheus.yml"
    written.write_text(yaml.safe_dump(config))
    return written


class Prometheus:
    """One that runs."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def get(self, path: str, **params: str) -> Any:
        """What its API answers; None while it can't."""
        try:
            answer = await self._http.get(f"/api/v1/{path}", params=params)
        except httpx.TransportError:
            return None
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return None  # it listens, and still reads its storage
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    async def result(self, expression: str) -> Any:
        data = await self.get("query", query=expression.replace("$__rate_interval", "1m"))
        return data["result"]


@asynccontextmanager
async def prometheus(folder: Path, port: int) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes a frontend."""
    own = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={configuration(folder, port)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{own}") as http:
            yield Prometheus(http)
    finally:
        process.terminate()
        await process.wait()


@needs_prometheus
async def test_promtool_takes_the_files(tmp_path: Path) -> None:
    checking = await asyncio.create_subprocess_exec(
        *("promtool", "check", "config", str(configuration(tmp_path, 1))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await checking.communicate()
    assert checking.returncode == 0, said.decode()


@needs_prometheus
async def test_every_panel_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    async with monitored() as frontend, prometheus(tmp_path, frontend.port) as server:

        async def scraped() -> bool:
            await frontend.ask()
            query = "count_over_time({__name__=~'mmrouter_workers|vllm:num_preemptions_total'}[1m])"
            data = await server.get("query", query=query)
            counts = [] if data is None else [int(one["value"][1]) for one in data["result"]]
            return len(counts) >= 3 and min(counts) >= 3

        async with asyncio.timeout(120):
            while not await scraped():  # noqa: ASYNC110  # another process sets no event
                await asyncio.sleep(0.1)
        targets = (await server.get("targets"))["activeTargets"]
        assert [(each["health"], each["lastError"]) for each in targets] == [("up", "")] * 2
        for expression in panels():
            found = await server.result(expression.text)
            assert found or expression.place in QUIET, expression
        for expression in alerts():
            await server.result(expression.text)
        groups = (await server.get("rules"))["groups"]
        told = [rule for group in groups for rule in group["rules"]]
        assert len(told) == len(rules())
        assert [rule for rule in told if rule.get("lastError")] == []
        by_worker = await server.result('vllm:num_preemptions_total{job="mmrouter-workers"}')
        assert {one["metric"]["worker_id"] for one in by_worker} == {"w0", "w1"}
