"""Pages that workers wrote: read strictly, joined to one that every scraper can read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Summary,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from frontend.http.operator.exposition import (
    MAX_LINE_LEN,
    ExpositionError,
    Family,
    Joined,
    PageReader,
)

ODD = 'a "quoted" {brace} \\ back\nslash, and=equals # HELP no'

Sample = tuple[str, tuple[tuple[str, str], ...], float]


def page(value: float = 1.5) -> bytes:
    """One of each kind that prometheus_client writes."""
    registry = CollectorRegistry()
    Gauge("vllm:running", f"help {ODD}", ["model_name"], registry=registry).labels(ODD).set(value)
    Gauge("nothing", "without samples", ["label"], registry=registry)
    for odd in ("nan", "inf", "-inf", "1e-9", "1e300"):
        Gauge(f"odd_{odd.replace('-', 'm')}", "", registry=registry).set(float(odd))
    Counter("counted", "", ["worker_id"], registry=registry).labels("somebody else").inc()
    Histogram("took_seconds", "", ["stage"], registry=registry).labels("x").observe(value)
    Summary("said", "", registry=registry).observe(value)
    Info("build", "", registry=registry).info({"version": "1"})
    return generate_latest(registry)


def read(text: bytes, worker: str = "w0", lines: int = 3) -> dict[str, Family]:
    reader = PageReader(text, "worker_id", worker)
    while reader.read(lines):
        pass
    return reader.families


def joined(*pages: tuple[str, bytes]) -> str:
    whole = Joined()
    for worker, text in pages:
        whole.add(read(text, worker))
    return b"".join(whole).decode()


def samples(text: str) -> list[Sample]:
    return [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


@pytest.mark.parametrize("lines", [1, 3, 1000])
def test_all_that_prometheus_client_writes_arrives(lines: int) -> None:
    whole, original = Joined(), page()
    whole.add(read(original, ODD, lines))
    found = samples(b"".join(whole).decode())
    expected = [
        (name, tuple(sorted((dict(labels) | {"worker_id": ODD}).items())), value)
        for name, labels, value in samples(original.decode())
    ]
    assert json.dumps(found) == json.dumps(expected)  # in which NaN equals NaN


def test_pages_of_several_are_one_page() -> None:
    text = joined(("w0", page()), ("w1", page(2.0)))
    assert text.count("# TYPE took_seconds histogram") == 1
    running = {labels: value for name, labels, value in samples(text) if name == "vllm:running"}
    assert sorted(running.values()) == [1.5, 2.0]
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    places = [place for place, name in enumerate(names) if name == "vllm:running"]
    assert places == [places[0], places[0] + 1]


def test_nobody_speaks_for_another() -> None:
    text = joined(("w1", b'# TYPE up gauge\nup{a="x",worker_id="w0",b="y"} 1\n'))
    assert 'up{worker_id="w1",a="x",b="y"} 1\n' in text
    assert "w0" not in text


def test_of_what_pages_disagree_on_nothing_is_lost() -> None:
    text = joined(("w0", b"# TYPE a gauge\na 1\n"), ("w1", b"# TYPE a counter\na 2\n"))
    assert text == '# TYPE a untyped\na{worker_id="w0"} 1\na{worker_id="w1"} 2\n'


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a 1 2",
        "a one",
        "a 0x10",
        "a 1_000",
        "a \u0661",
        "a 1\r",
        " a 1",
        "b 1",
        "a_total 1",
        'a{b="c} 1',
        'a{b="c"d="e"} 1',
        'a{b="c",} 1',
        'a{b="\\q"} 1',
        'a{b="c",b="d"} 1',
        'a{worker_id="c",worker_id="d"} 1',
        'a{__name__="up"} 1',
        "a{} 1",
        "# EOF",
        "# HELP a",
        "# TYPE a gauge",
        "# TYPE b nonsense",
        "a 1 # {} 1",
        "a{" + ",".join(f'l{place}="x"' for place in range(MAX_LINE_LEN)) + "} 1",
        "\x00",
    ],
)
def test_a_page_with_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ExpositionError, match=r"^line [34] "):
        read(f"# TYPE a gauge\na 1\n{line}\na 2\n".encode())


@pytest.mark.parametrize("text", [b"a 1\n", b"\xff", b"# TYPE a gauge\na 1\xff\n"])
def test_so_is_one_that_is_no_text(text: bytes) -> None:
    with pytest.raises(ExpositionError):
        read(text)


def test_nothing_is_no_page_and_no_error() -> None:
    assert joined(("w0", b""), ("w1", b"\n\n")) == ""


LINE = st.sampled_from(page().decode().split("\n"))


@given(
    st.lists(LINE | st.text(max_size=30), max_size=12).map("\n".join).map(str.encode)
    | st.binary(max_size=60)
)
def test_what_is_let_through_can_be_read(text: bytes) -> None:
    try:
        families = read(text)
    except ExpositionError:
        return
    whole = Joined()
    whole.add(families)
    for _, labels, _ in samples(b"".join(whole).decode()):
        assert dict(labels)["worker_id"] == "w0"
