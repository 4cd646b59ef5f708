from common.identity import MmHash
from frontend.processing.known_hashes import KnownHashes

H = MmHash("h")


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    hashes = KnownHashes(most=2)
    hashes.remember("a", H)
    hashes.remember("b", H)
    assert hashes.recall("a") == H
    hashes.remember("c", H)
    assert [key for key in "abc" if hashes.recall(key)] == ["a", "c"]


def test_nothing_is_known_of_what_was_cleared() -> None:
    hashes = KnownHashes()
    hashes.remember("a", H)
    hashes.clear()
    assert hashes.recall("a") is None
