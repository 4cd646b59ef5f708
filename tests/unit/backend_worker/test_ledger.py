"""What each frontend has: sums that fit under every order of events."""

import random

import pytest

from backend_worker.plane.ledger import Account, Entry, Ledger, Share


@pytest.fixture
def ledger() -> Ledger:
    return Ledger((4, 5), lambda: None)


def test_others_see_each_step_of_a_request_and_its_frontend_none(ledger: Ledger) -> None:
    own, other = ledger.open(), ledger.open()
    entry = own.started(5, prefill_tokens=30, prompt_tokens=100)
    assert other.others() == {4: Share(), 5: Share(1, 30, 0)}
    entry.first_output()
    assert other.others() == {4: Share(), 5: Share(1, 0, 100)}
    entry.ended()
    assert other.others() == {4: Share(), 5: Share()}
    assert own.others() == {4: Share(), 5: Share()}


def test_steps_taken_twice_or_too_late_count_once(ledger: Ledger) -> None:
    own, other = ledger.open(), ledger.open()
    entry = own.started(4, 30, 100)
    for _ in range(2):
        entry.first_output()
    for _ in range(2):
        entry.ended()
    entry.first_output()
    assert other.others()[4] == Share()


def test_only_changes_of_others_are_news(ledger: Ledger) -> None:
    own, other, third = ledger.open(), ledger.open(), ledger.open()
    entry = own.started(4, 1, 1)
    assert (own.has_news, other.has_news, third.has_news) == (False, True, True)
    other.told()
    assert (own.has_news, other.has_news, third.has_news) == (False, False, True)
    entry.first_output()
    other.started(4, 1, 1)
    assert (own.has_news, other.has_news, third.has_news) == (True, True, True)


def test_a_frontend_alone_never_has_news(ledger: Ledger) -> None:
    own = ledger.open()
    entry = own.started(4, 1, 1)
    entry.first_output()
    entry.ended()
    assert not own.has_news


def test_who_comes_late_has_nothing_to_catch_up_once_told(ledger: Ledger) -> None:
    ledger.open().started(4, 1, 1)
    late = ledger.open()
    assert late.others()[4].active == 1
    late.told()
    assert not late.has_news


def test_what_names_no_rank_goes_where_the_fewest_are(ledger: Ledger) -> None:
    own, other = ledger.open(), ledger.open()
    assert ledger.least_busy() == 4
    entry = own.started(4, 1, 1)
    assert ledger.least_busy() == 5
    other.started(5, 1, 1)
    other.started(5, 1, 1)
    assert ledger.least_busy() == 4
    entry.ended()
    assert ledger.least_busy() == 4


@pytest.mark.parametrize("seed", range(20))
def test_sums_fit_whatever_happens_in_whatever_order(seed: int) -> None:
    draw = random.Random(seed)
    ledger = Ledger((0, 1, 2), lambda: None)
    accounts = [ledger.open() for _ in range(4)]
    running: dict[Entry, tuple[Account, int, list[int]]] = {}
    for _ in range(300):
        kind = draw.choice(["start", "start", "first", "end"])
        if kind == "start":
            account, rank = draw.choice(accounts), draw.choice(ledger.ranks)
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
