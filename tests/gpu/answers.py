"""Whether mmrouter answers as plain vLLM does, and predicts what caches hold."""

import random
from collections.abc import Sequence
from typing import Final

from tests.gpu.client import Answer, Client
from tests.gpu.results import Answers
from tests.pictures import data_uri, picture

_SIZES: Final = ((112, 112), (224, 168), (448, 448), (640, 480), (1024, 1024))
_ASKED: Final = ("What do you see?", "What is in the picture?", "Name a colour.", "Which shape?")


def compare_answers(
    router: Client, plain: Client, questions: int, sizes: Sequence[tuple[int, int]] = _SIZES
) -> Answers:
    """Ask both the same, one question at a time; then the first half of all questions again."""
    draw = random.Random(7)
    asked = [_question(draw, sizes[n % len(sizes)], n, questions // 2) for n in range(questions)]
    asked += asked[: questions // 2]
    same = exact = hits = 0
    differences = []
    for n, (pictures, question) in enumerate(asked):
        ours, theirs = router.ask(pictures, question), plain.ask(pictures, question)
        decision = router.decision(ours.response_id)
        predicted, realised = (
            decision[f"{name}_cached_tokens"] for name in ("predicted", "realised")
        )
        hits += ours.cached > 0
        if predicted == realised == ours.cached:
            exact += 1
        else:
            differences.append(
                f"question {n}: {predicted} cached tokens predicted, {realised} realised, "
                f"{ours.cached} reported"
            )
        if ours.tokens == theirs.tokens:
            same += 1
        else:
            differences.append(f"question {n}: {_difference(ours, theirs)}")
    return Answers(len(asked), same, exact, hits, differences[:12])


def _question(
    draw: random.Random, size: tuple[int, int], n: int, pictures: int
) -> tuple[list[str], str]:
    names = [str(draw.randrange(pictures)) for _ in range(2 if n % 5 == 4 else 1)]
    return [data_uri(picture(name, size)) for name in names], draw.choice(_ASKED)


def _difference(ours: Answer, theirs: Answer) -> str:
    pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
    at = next((n for n, (our, their) in pairs if our != their), len(ours.tokens))
    return (
        f"token {at} differs, {ours.cached} and {theirs.cached} tokens were cached, "
        f"the closest choice was {min(ours.closest, theirs.closest):.4f} apart"
    )
