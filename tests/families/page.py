"""Writes docs/families.md from what came out."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.families.catalog import registry
from tests.families.questions import BY_MEDIUM, Medium
from tests.families.results import Result, summary

HEAD = """<!-- Made by `make families`; tests/families/page.py has the words. -->
# Families of models

For each architecture of vLLM's multimodal registry of
which a tiny random model can be made without a model hub, a worker, three frontends and a plain
vLLM with the same flags are started, and both sides are asked the same: text, an image, the same
again, two in both orders, one twice in one prompt, videos, sound. Media travel by shared memory,
with the request (`inline`), or not at all (`reference`: the worker processes them).

*Same* means the same status, text, prompt tokens and cached tokens; that as many tokens were found
in the cache as the router had predicted; that media went the way they should; and that no worker
ran its processor, but where media do not travel. A number in brackets says how many questions.
*Answered by ours only*: the processor breaks on several media at once, as plain vLLM gives them to
it, and ours gives it one at a time. *Other*: an image, a video or a sound, for a model that was
not asked about it else; where both refuse, with the same message. *Deaf*: under its random weights
another medium gets the same text, so that only tokens tell whether the medium is the right one.
"""
MEDIA: tuple[Medium, ...] = (*BY_MEDIUM, "other")


def write(results: Sequence[Result], path: Path) -> None:
    families = sorted((r for r in results if not r.mode), key=lambda r: (r.architecture, r.case))
    modes = [result for result in results if result.mode]
    figures = summary(results, registry())
    parts = [
        HEAD,
        f"{figures.architectures} architectures, {figures.cases} questions; "
        f"{figures.differ} differ; {figures.unbuildable} architectures of the registry are not "
        f"built.{_not_run(families)}\n",
        "## Architectures\n",
        *_table("architecture", ((f"`{r.architecture}`", r) for r in families)),
        "\n## Engines in another mode\n",
        *_table("mode", ((r.mode, r) for r in modes)),
        *_not_had(modes),
        *_differing(results),
        "\n## Not built\n",
        *_not_built(families),
    ]
    path.write_text("\n".join(parts) + "\n")


def _not_had(modes: Iterable[Result]) -> list[str]:
    lines = [f"- {r.mode}: {r.unbuilt}" for r in modes if r.unbuilt]
    return ["\nNot to be had where this ran; what plain vLLM says:\n", *lines] if lines else []


def _not_run(families: Iterable[Result]) -> str:
    run = {result.architecture for result in families}
    missing = [f"`{name}`" for name, why in registry().items() if not why and name not in run]
    return f" Not run yet: {', '.join(missing)}." if missing else ""


def _table(title: str, rows: Iterable[tuple[str, Result]]) -> list[str]:
    rows = list(rows)
    asked = {answer.medium for _, result in rows for answer in result.answers}
    media = [medium for medium in MEDIA if medium in asked or medium not in ("embeddings", "other")]
    head = f"| {title} | model | {' | '.join(media)} | cache |"
    lines = [head, "|---" * (len(media) + 3) + "|"]
    for name, result in rows:
        if result.unbuilt:
            continue
        cells = [_cell(result, medium) for medium in media]
        lines.append(f"| {name} | {result.case} | {' | '.join(cells)} | {result.index or '-'} |")
    return lines


def _cell(result: Result, medium: Medium) -> str:
    answers = [answer for answer in result.answers if answer.medium == medium]
    if not answers:
        return "does not start" if result.broken else ""
    differing = sum(bool(answer.differs) for answer in answers)
    refused = sum(answer.status != 200 != answer.ours for answer in answers)
    alone = sum(answer.status != 200 == answer.ours for answer in answers)
    words = f"{differing} of {len(answers)} differ" if differing else f"same ({len(answers)})"
    words += "" if result.follows(medium) else ", deaf"
    words += f", {refused} refused by both" if refused else ""
    return words + (f", {alone} answered by ours only" if alone else "")


def _differing(results: Iterable[Result]) -> list[str]:
    lines = [
        f"- {result.case}, {answer.way}, {answer.question}: {'; '.join(answer.differs)}"
        for result in results
        for answer in result.differing
    ]
    lines += [f"- {result.case}: {result.broken}" for result in results if result.broken]
    return ["\n## What differs\n", *lines] if lines else []


def _not_built(families: Iterable[Result]) -> list[str]:
    reasons = {name: why for name, why in registry().items() if why}
    built = {result.architecture for result in families if not result.unbuilt}
    for result in families:
        if result.unbuilt and result.architecture not in built:
            reasons[result.architecture] = result.unbuilt
    rows = [f"| `{name}` | {why} |" for name, why in sorted(reasons.items())]
    return ["| architecture | because |", "|---|---|", *rows]
