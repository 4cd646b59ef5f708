"""What each frontend has: sums that fit under every order of events."""

import random

import pytest

from backend_worker.plane.frontend_loads import Account, Entry, FrontendLoads, Share


@pytest.fixture
def loads() -> FrontendLoads:
    return FrontendLoads((4, 5), lambda: None)


def test_others_see_each_step_of_a_request_and_its_frontend_none(loads: FrontendLoads) -> None:
    own, other = loads.open(), loads.open()
    entry = own.started(5, prefill_tokens=30, prompt_tokens=100)
    assert other.others() == {4: Share(), 5: Share(1, 30, 0)}
    entry.first_output()
    assert other.others() == {4: Share(), 5: Share(1, 0, 100)}
    entry.ended()
    assert other.others() == {4: Share(), 5: Share()}
    assert own.others() == {4: Share(), 5: Share()}


def test_steps_taken_twice_or_too_late_count_once(loads: FrontendLoads) -> None:
    own, other = loads.open(), loads.open()
    entry = own.started(4, 30, 100)
    for _ in range(2):
        entry.first_output()
    for _ in range(2):
        entry.ended()
    entry.first_output()
    assert other.others()[4] == Share()


def test_choices_count_as_the_engines_requests(loads: FrontendLoads) -> None:
    own, other = loads.open(), loads.open()
    entries = [own.started(4, 30, 100, choices=8) for _ in range(2)]
    assert other.others()[4] == Share(16, 60, 0)
    entries[0].first_output()
    assert other.others()[4] == Share(16, 30, 100)
    for entry in entries:
        entry.ended()
    assert other.others()[4] == Share()


def test_only_changes_of_others_are_news(loads: FrontendLoads) -> None:
    own, other, third = loads.open(), loads.open(), loads.open()
    entry = own.started(4, 1, 1)
    assert (own.has_news, other.has_news, third.has_news) == (False, True, True)
    other.told()
    assert (own.has_news, other.has_news, third.has_news) == (False, False, True)
    entry.first_output()
    other.started(4, 1, 1)
    assert (own.has_news, other.has_news, third.has_news) == (True, True, True)


def test_a_frontend_alone_never_has_news(loads: FrontendLoads) -> None:
    own = loads.open()
    entry = own.started(4, 1, 1)
    entry.first_output()
    entry.ended()
    assert not own.has_news


def test_who_comes_late_has_nothing_to_catch_up_once_told(loads: FrontendLoads) -> None:
    loads.open().started(4, 1, 1)
    late = loads.open()
    assert late.others()[4].active == 1
    late.told()
    assert not late.has_news


def test_what_names_no_rank_goes_where_the_fewest_are(loads: FrontendLoads) -> None:
    own, other = loads.open(), loads.open()
    assert loads.least_busy() == 4
    entry = own.started(4, 1, 1)
    assert loads.least_busy() == 5
    other.started(5, 1, 1)
    other.started(5, 1, 1)
    assert loads.least_busy() == 4
    entry.ended()
    assert loads.least_busy() == 4


@pytest.mark.parametrize("seed", range(20))
def test_sums_fit_whatever_happens_in_whatever_order(seed: int) -> None:
    draw = random.Random(seed)
    loads = FrontendLoads((0, 1, 2), lambda: None)
    accounts = [loads.open() for _ in range(4)]
    running: dict[Entry, tuple[Account, int, list[int]]] = {}
    for _ in range(300):
        kind = draw.choice(["start", "start", "first", "end"])
        if kind == "start":
            account, rank = draw.choice(accounts), draw.choice(loads.ranks)
            prefill, prompt = draw.randrange(100), draw.randrange(200)
            entry = account.started(rank, prefill, prompt)
            running[entry] = account, rank, [prefill, prompt, 0]
        elif running:
            entry = draw.choice(list(running))
            if kind == "first":
                entry.first_output()
                running[entry][2][2] = 1
            else:
                entry.ended()
                del running[entry]
        reader = draw.choice(accounts)
        for rank, share in reader.others().items():
            theirs = [w for a, r, w in running.values() if a is not reader and r == rank]
            assert share == Share(
                len(theirs),
                sum(prefill for prefill, _, decoding in theirs if not decoding),
                sum(prompt for _, prompt, decoding in theirs if decoding),
            )
