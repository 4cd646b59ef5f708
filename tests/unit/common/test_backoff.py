from common.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert [backoff.next_s(1e9) for _ in range(2)] == [0.5, 1.0]


def test_a_try_that_ran_for_long_was_a_success() -> None:
    backoff = Backoff(1.0, 30.0, calm_s=60.0)
    assert [backoff.next_s(ran_s) for ran_s in (0.1, 60.0, 61.0, 0.1)] == [1.0, 2.0, 1.0, 2.0]
