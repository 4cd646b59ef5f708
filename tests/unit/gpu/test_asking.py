"""How answers and times of a run on a GPU are counted, over servers that follow a script."""

import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.gpu.answers import compare_answers
from tests.gpu.client import Answer, Client
from tests.gpu.first_tokens import PLAIN, time_first_tokens
from tests.gpu.server_cost import between, cost_so_far

Asked = tuple[str, str]
"""Who was asked, and about which pictures."""

SMALL = [(16, 16), (24, 8)]


class Scripted(Client):
    """Says the same about everything, and remembers what it was asked."""

    def __init__(self, name: str, asked: list[Asked], *, way: str = "shm", predicted: int = 0):
        self.name, self.asked, self.way, self.predicted = name, asked, way, predicted

    def ask(self, pictures: Sequence[str], question: str, tokens: int = 24) -> Answer:
        self.asked.append((self.name, str(pictures)))
        return Answer("an-id", (self.name[0], "b"), 0, 0.5)

    def first_token(self, pictures: Sequence[str], question: str) -> tuple[float, str]:
        self.asked.append((self.name, str(pictures)))
        return float(len(self.asked)), "an-id"

    def decision(self, response_id: str) -> dict[str, Any]:
        return {
            "predicted_cached_tokens": self.predicted,
            "realised_cached_tokens": 0,
            "media": [{"transport": self.way, "how": "shipped"}],
        }


def test_both_are_asked_the_same_and_half_of_it_again() -> None:
    asked: list[Asked] = []
    found = compare_answers(Scripted("plan", asked), Scripted("plain", asked), 8, SMALL)
    assert (found.questions, found.same_tokens, found.predicted_is_realised) == (12, 12, 12)
    assert found.differences == []
    ours, theirs = ([about for name, about in asked if name == each] for each in ("plan", "plain"))
    assert ours == theirs and ours[8:] == ours[:4]


def test_other_tokens_and_wrong_predictions_are_told_apart() -> None:
    asked: list[Asked] = []
    found = compare_answers(Scripted("ours", asked), Scripted("plain", asked), 2, SMALL)
    assert (found.same_tokens, found.predicted_is_realised) == (0, 3)
    assert "token 0 differs" in found.differences[0] and "0.5000 apart" in found.differences[0]
    found = compare_answers(Scripted("p", asked, predicted=7), Scripted("plain", asked), 2, SMALL)
    assert (found.same_tokens, found.predicted_is_realised) == (3, 0)
    assert "7 cached tokens predicted, 0 realised" in found.differences[0]


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    asked: list[Asked] = []
    names = (PLAIN, "shm", "nixl")
    contenders = {name: Scripted(name, asked, way=name) for name in names}
    found = time_first_tokens(contenders, 2, dict.fromkeys(names, os.getpid()), 16)
    assert {name: each.samples for name, each in found.items()} == dict.fromkeys(names, 4)
    order = [name for name, _ in asked[::4]]  # a block is two pictures, each asked about twice
    assert order == [PLAIN, "shm", "nixl", "shm", "nixl", PLAIN, "nixl", PLAIN, "shm"]
    pictures = [about for _, about in asked]
    assert pictures[::2] == pictures[1::2], "each picture is asked about twice in a row"
    assert len(set(pictures[::2])) == len(pictures) // 2, "and is new at first"
    # The scripted time is the number of the request: of shm 13, 15, 33 and 35 are new ones.
    assert (found["shm"].new_ms, found["shm"].repeated_ms) == (24, 25)
    assert found["nixl"].ways == {"nixl": 4}


def test_there_is_no_time_of_a_way_that_was_not_taken() -> None:
    asked: list[Asked] = []
    contenders = {"nixl": Scripted("nixl", asked, way="inline"), PLAIN: Scripted(PLAIN, asked)}
    found = time_first_tokens(contenders, 1, dict.fromkeys(contenders, os.getpid()), 16)
    assert (found["nixl"].new_ms, found["nixl"].ways) == (None, {"inline": 2})
    assert found["nixl"].repeated_ms is not None and found[PLAIN].new_ms is not None
    assert found[PLAIN].new_cost is not None


def test_pages_that_a_process_took_are_counted() -> None:
    before = cost_so_far(os.getpid())
    with mmap.mmap(-1, 4 << 20) as pages:
        pages.write(bytes(4 << 20))
        taken = between(before, cost_so_far(os.getpid()))
    assert taken.faults >= 1, "and few, where the kernel gives huge ones"


class Server(BaseHTTPRequestHandler):
    """The stream of the test, and two workers, the cache of one of which is known."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer("text/event-stream", "".join(f"data: {each}\n\n" for each in STREAM))

    def do_GET(self) -> None:
        self.answer("application/json", json.dumps(WORKERS))

    def answer(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


STREAM: list[str] = []
WORKERS = [
    {"worker_id": "a", "transport": "shm", "ranks": [{"index": "exact"}]},
    {"worker_id": "b", "transport": "shm", "ranks": [{"index": "unknown"}]},
]


@pytest.fixture
def client() -> Iterator[Client]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = Client(f"http://127.0.0.1:{server.server_address[1]}")
    yield client
    client.close()
    server.shutdown()
    thread.join()
    server.server_close()


def event(content: str | None, finish: str | None = None) -> str:
    choice = {"delta": {"content": content}, "finish_reason": finish}
    return json.dumps({"id": "an-id", "choices": [choice]})


@pytest.mark.parametrize(
    "stream",
    [
        [event(""), event("a"), event(None, "length"), "[DONE]"],
        [event(""), event("", "length"), "[DONE]"],
    ],
)
def test_a_stream_has_a_first_token_or_ends_with_it(client: Client, stream: list[str]) -> None:
    STREAM[:] = stream
    ms, response_id = client.first_token(["data:image/png;base64,"], "What?")
    assert ms > 0 and response_id == "an-id"


def test_a_stream_without_any_is_an_error(client: Client) -> None:
    STREAM[:] = [event(""), "[DONE]"]
    with pytest.raises(RuntimeError, match="the stream an-id has no token"):
        client.first_token(["data:image/png;base64,"], "What?")


def test_only_workers_whose_cache_is_known_count(client: Client) -> None:
    assert client.transports() == {"a": "shm"}
