"""What came out of a run is kept case by case, and told in four figures and a page."""

from pathlib import Path

import pytest

from tests.families import page
from tests.families.questions import OTHERS, Medium, questions
from tests.families.results import Answer, Result, path_of, read, summary, write

LLAVA = "LlavaForConditionalGeneration"
WHISPER = "WhisperForConditionalGeneration"


def answer(*differs: str, medium: Medium = "image", status: int = 200, ours: int = 200) -> Answer:
    return Answer("shm", medium, "an image", list(differs), status, ours, "river")


def result(case: str = "llava", *answers: Answer, mode: str = "", **more: str) -> Result:
    return Result(case, LLAVA, mode, list(answers), **more)  # type: ignore[arg-type]


def test_a_result_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    assert read("llava", tmp_path / "nowhere") is None
    kept = result("llava", answer("text: ours 'a', plain 'b'"), broken="it ended")
    write(kept, tmp_path)
    assert read("llava", tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [path_of("llava", tmp_path).name]


def test_four_figures() -> None:
    results = [
        result("llava", answer(), answer("text")),
        result("no-prefix-cache", answer(), mode="prefix caching off"),
        result("two-ranks", mode="data parallel 2", broken="the worker ended"),
        result("aria", unbuilt="no such package"),
        Result("ovis", WHISPER, "", [answer(medium="text")], unbuilt="a picture ends its engine"),
    ]
    figures = summary(results, {LLAVA: "", WHISPER: "an encoder"})
    assert (figures.architectures, figures.cases) == (1, 4)
    assert (figures.differ, figures.unbuildable) == (2, 1)


def test_the_page_says_what_differs_and_what_is_not_built(tmp_path: Path) -> None:
    results = [
        result("llava", answer(), answer("cached tokens: ours 0, plain 32")),
        result("two-ranks", answer(), mode="data parallel 2"),
        result("two-devices", mode="tensor parallel 2", unbuilt="vLLM's own words"),
        result("lone", answer(status=400, ours=200), answer(status=400, ours=400), mode="one"),
    ]
    page.write(results, tmp_path / "families.md")
    text = (tmp_path / "families.md").read_text()
    assert "| `LlavaForConditionalGeneration` | llava |  | 1 of 2 differ |" in text
    assert "| data parallel 2 | two-ranks |  | same (1) |" in text
    assert "- tensor parallel 2: vLLM's own words" in text
    assert "same (2), 1 refused by both, 1 answered by ours only" in text
    assert "- llava, shm, an image: cached tokens: ours 0, plain 32" in text
    assert f"| `{WHISPER}` | an encoder-decoder model" in text


@pytest.mark.parametrize("whole", [False, True])
def test_no_two_ways_share_a_medium(whole: bool) -> None:
    """Or the second of them would find it in the cache."""
    everything: frozenset[Medium] = frozenset({"text", "image", "video", "sound", "embeddings"})
    media = [
        {
            str(part)
            for question in questions(way, everything, whole=whole)
            for part in question.content
            if part["type"] != "text"
        }
        for way in ("shm", "inline")
    ]
    assert media[0] and not media[0] & media[1]


def test_a_model_is_deaf_if_another_medium_gets_the_same_text(tmp_path: Path) -> None:
    one, other = (Answer("shm", "image", name, [], 200, 200, "river") for name in OTHERS["image"])
    deaf = result("deaf", one, other, mode="deaf")
    assert not deaf.follows("image") and deaf.follows("video")
    assert result("lone", one).follows("image")
    page.write([deaf], tmp_path / "families.md")
    assert "same (2), deaf" in (tmp_path / "families.md").read_text()
