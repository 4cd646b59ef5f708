"""One valid page of metrics from those of several processes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from frontend.asgi import Door, unanswered
from frontend.http.operator.merged_metrics import MergedMetrics, SharedPage, merge

ODD = 'a "quoted" {brace} \\ back\nslash, and=equals # HELP no'


def page(*values: float, more: bool = False) -> bytes:
    registry = CollectorRegistry()
    for value in values:
        Gauge("plain", 'help with "quotes" {and} a # HELP', registry=registry).set(value)
    Counter("counted", "twice", ["kind"], registry=registry).labels(ODD).inc(values[0])
    Histogram("took", "seconds", ["stage"], registry=registry).labels("x").observe(values[0])
    Gauge("empty", "no samples", ["label"], registry=registry)
    if more:
        Gauge("only_here", "of one process", registry=registry).set(7)
    return generate_latest(registry)


def samples(merged: bytes) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
    families = set()
    for family in text_string_to_metric_families(merged.decode()):
        assert family.name not in families or family.name.endswith("created")
        families.add(family.name)
        for sample in family.samples:
            yield sample.name, tuple(sorted(sample.labels.items())), sample.value


async def test_each_sample_has_its_process_and_is_there_once() -> None:
    merged = await merge({"1": page(2.0, more=True), "0": page(1.0), "parent": page(3.0)})
    found = list(samples(merged))
    assert len({each[:2] for each in found}) == len(found)
    values = {(name, dict(labels)["process"]): value for name, labels, value in found}
    assert [values["plain", process] for process in ("0", "1", "parent")] == [1.0, 2.0, 3.0]
    assert values["only_here", "1"] == 7.0
    kinds = {dict(labels)["kind"] for name, labels, _ in found if name == "counted_total"}
    assert kinds == {ODD}
    text = merged.decode()
    for line in ("# TYPE plain gauge", "# TYPE counted_total counter", "# TYPE took histogram"):
        assert text.count(line) == 1


async def test_samples_of_a_family_stand_together() -> None:
    merged = await merge({"0": page(1.0), "1": page(2.0)})
    lines = merged.decode().splitlines()
    names = [line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")]
    plain = [index for index, name in enumerate(names) if name == "plain"]
    assert plain == list(range(plain[0], plain[0] + 2))


class Sibling:
    """Another process with one metric."""

    name = "0"

    def tell(self, topic: str, answer: object) -> None:
        """This process is not asked."""

    async def ask(self, topic: str) -> list[tuple[str, bytes]]:
        return [("1", page(7.0))]


async def test_the_head_is_that_of_all_processes() -> None:
    siblings: Any = Sibling()
    door = Door(unanswered, [MergedMetrics(siblings)])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(door), base_url="http://frontend"
    ) as http:
        whole, head = await http.get("/metrics"), await http.head("/metrics")
    assert 'plain{process="1"} 7.0' in whole.text
    assert head.headers["content-type"] == whole.headers["content-type"]


async def test_scrapes_that_wait_share_a_page_that_is_no_older() -> None:
    """One of them is given up, and takes no page from others."""
    started, goes_on, begun = asyncio.Event(), asyncio.Event(), list[int]()

    async def make() -> bytes:
        begun.append(len(begun) + 1)
        started.set()
        number = str(begun[-1]).encode()
        await goes_on.wait()
        return number

    shared = SharedPage(make)
    given_up = asyncio.create_task(shared.read())
    await started.wait()
    scrapes = [asyncio.create_task(shared.read()) for _ in range(50)]
    await asyncio.sleep(0)
    given_up.cancel()
    goes_on.set()
    assert {(await scrape).body for scrape in scrapes} == {b"2"}
    assert (await shared.read()).body == b"3"


async def test_a_process_alone_labels_nothing() -> None:
    door = Door(unanswered, [MergedMetrics(None)])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(door), base_url="http://frontend"
    ) as http:
        assert "\nprocess_open_fds " in (await http.get("/metrics")).text


@pytest.mark.parametrize("pages", [{}, {"0": b""}])
async def test_nothing_from_nothing(pages: dict[str, bytes]) -> None:
    assert await merge(pages) == b""
