"""Four of the families of ``make families``, chosen for mechanisms that no two of them share.

With those of :mod:`tests.e2e.test_families` they are six: tiles with text between their
placeholders, and sound within films. One after the other, for the sake of memory.
"""

from pathlib import Path

import pytest

from tests.e2e.conftest import LetGo
from tests.families.catalog import CASES
from tests.families.run import run

FAMILIES = {
    "blip2": "an image's tokens before all text, where nothing stands for them",
    "gemma3": "attention in both directions within an image; windows, so two groups of blocks",
    "lfm2-vl": "short convolutions, whose states are cached beside blocks",
    "qwen3-vl": "an encoder that speaks to several layers; times between a film's frames",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_a_plain_vllm(
    name: str, tmp_path: Path, let_go: LetGo, subtests: pytest.Subtests
) -> None:
    """In text and tokens, and as many tokens are cached as were predicted."""
    result = run(CASES[name], tmp_path, ways=["shm"], stop=let_go)
    assert (result.unbuilt, result.broken, result.index) == ("", "", "exact")
    assert any(answer.cached for answer in result.answers)
    for answer in result.answers:
        with subtests.test(answer.question):
            assert answer.differs == []
            assert (answer.status, answer.ours) in {(200, 200), (400, 400)}, answer.said
