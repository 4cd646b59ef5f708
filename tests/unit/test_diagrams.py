"""The diagrams are drawn from the code as it is."""

from xml.etree import ElementTree

import pytest

from common.request_plane.lifecycle import TRANSITIONS, Event, State
from setup.diagrams import ROOT, diagrams, lifecycle, steps


@pytest.mark.parametrize("name", diagrams())
def test_each_is_up_to_date_and_loads_nothing(name: str) -> None:
    drawn = (ROOT / "docs" / "diagrams" / name).read_text()
    assert drawn == diagrams()[name], "run `make docs`"
    for element in ElementTree.fromstring(drawn).iter():
        assert not {key for key in element.attrib if key.endswith(("href", "src"))}


def test_no_other_lies_there() -> None:
    assert {path.name for path in (ROOT / "docs" / "diagrams").iterdir()} == set(diagrams())


def test_a_request_has_six_steps() -> None:
    assert [f"{number} " in steps() for number in range(1, 8)] == [True] * 6 + [False]


def test_each_state_and_event_is_drawn() -> None:
    texts = [element.text or "" for element in ElementTree.fromstring(lifecycle()).iter()]
    assert set(State) <= set(texts)
    for event in {event for _, event in TRANSITIONS} - {Event.ERROR, Event.CANCEL}:
        assert any(event in text.split(", ") for text in texts), event
