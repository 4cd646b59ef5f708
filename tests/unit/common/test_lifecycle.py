"""The table of states and events, and the page that is made from it."""

from pathlib import Path

import pytest

from common.errors import ProtocolError
from common.request_plane.lifecycle import FINAL, TRANSITIONS, Event, Lifecycle, State
from setup.lifecycle_page import MEANING, page

DOCS = Path(__file__).parents[3] / "docs"


def after(*events: Event) -> Lifecycle:
    lifecycle = Lifecycle()
    for event in events:
        lifecycle.on(event)
    return lifecycle


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "lifecycle.md").read_text() == page(), "run `make docs`"


def test_every_word_is_explained() -> None:
    assert set(MEANING) == {*State, *Event}


def test_no_state_is_a_dead_end_and_all_are_reached() -> None:
    leaving = {state for state, _ in TRANSITIONS}
    assert leaving == set(State) - FINAL
    assert set(TRANSITIONS.values()) == set(State) - {State.PREPARING}


def test_an_undisturbed_request() -> None:
    lifecycle = after(Event.PREPARED, Event.DISPATCHED, Event.NACK, Event.ACK)
    assert not lifecycle.answered
    lifecycle.on(Event.OUTPUT)
    assert lifecycle.answered
    lifecycle.on(Event.LAST_OUTPUT)
    assert lifecycle.state is State.FINISHED and lifecycle.ended


def test_a_worker_lost_before_the_first_output_leaves_no_trace() -> None:
    fresh = after(Event.PREPARED)
    retried = after(Event.PREPARED, Event.DISPATCHED, Event.WORKER_FAILED)
    assert retried.state is fresh.state and not retried.answered


def test_a_worker_lost_later_leaves_the_request_answered() -> None:
    lifecycle = after(Event.PREPARED, Event.DISPATCHED, Event.OUTPUT, Event.WORKER_FAILED)
    for event in (Event.DISPATCHED, Event.WORKER_FAILED, Event.DISPATCHED, Event.ACK):
        assert lifecycle.answered
        lifecycle.on(event)
    lifecycle.on(Event.OUTPUT)
    assert lifecycle.state is State.STREAMING


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("end", [Event.LAST_OUTPUT, Event.ERROR, Event.CANCEL])
def test_a_request_ends_once(end: Event, event: Event) -> None:
    lifecycle = after(Event.PREPARED, Event.DISPATCHED, end)
    state = lifecycle.state
    with pytest.raises(ProtocolError, match=f"unexpected {event} while a request is {state}"):
        lifecycle.on(event)
    assert lifecycle.state is state


@pytest.mark.parametrize("event", [Event.NACK, Event.ACK])
def test_media_are_settled_before_the_first_output(event: Event) -> None:
    lifecycle = after(Event.PREPARED, Event.DISPATCHED, Event.OUTPUT)
    with pytest.raises(ProtocolError):
        lifecycle.on(event)
