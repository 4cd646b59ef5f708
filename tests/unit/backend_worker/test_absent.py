"""A worker that no frontend takes says so on its log, within bounds."""

import pytest

from backend_worker.plane import session
from backend_worker.plane.session import MAX_REFUSING, Absent
from common.identity import Incarnation
from common.request_plane.protocol import Refused

THIS = Incarnation("i0")


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(session, "time", clock)
    return clock


def test_a_refusal_is_a_line_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    absent = Absent()
    for _ in range(13):
        absent.refused(Refused("f", THIS, "another\nmodel"), THIS)
        clock.now += 10
    assert len(caplog.records) == 3
    assert "'another\\nmodel'" in caplog.text


def test_strangers_make_a_bounded_number_of_lines(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    absent = Absent()
    for number in range(1000):
        absent.refused(Refused(f"f{number}", THIS, "so"), THIS)
    assert len(caplog.records) == MAX_REFUSING
    absent.refused(Refused("f", Incarnation("of a former worker at this port"), "so"), THIS)
    assert len(caplog.records) == MAX_REFUSING


def test_no_frontend_at_all(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    absent = Absent()
    for _ in range(1200):
        clock.now += 1
        absent.look(some=False)
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "--fleet-key-file" in said[0]
    absent.look(some=True)
    clock.now += 10_000
    absent.look(some=False)
    assert len(caplog.records) == 2, "one that came and went is no slip of the operator's"
