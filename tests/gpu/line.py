"""The one line that a run ends with."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from tests.gpu.results import Copies, Cost, FirstToken, Fleet, Kernels, Reads, Result

_T = TypeVar("_T", bound=Result)

PICTURE = "picture_uint8"
"""The size of copies and READs in the line: the tensors of one picture of 1024x1024."""

NOTHING = FirstToken(None, None, 0, {})


class Counted(NamedTuple):
    """Answers of one dtype; None if that part did not run."""

    questions: int | None
    same_tokens: int | None
    predicted_is_realised: int | None


class Line(msgspec.Struct, frozen=True):
    """The figures of a run. One that was not measured is null, and ``missing`` says why.

    Attributes:
        device: cuda, or cpu for a rehearsal, whose times say nothing about a GPU.
        questions: asked in float32, where other tokens mean a fault.
        questions_bfloat16: the same in bfloat16, where a cache hit may change how sums are rounded.
        first_token_new_ms: of a new 1024x1024 picture; ``repeated`` of the same request again.
        shm_ms, nixl_ms, inline_ms: ``first_token_new_ms`` with tensors that travel this way.
        new_cost: of a new picture, by contender, for the processes beside the engine.
        h2d_gb_s: from shared memory to the device, by way.
        nixl_gb_s: NIXL READs, by kinds of memory.
        not_engines_with_cuda: processes other than engines that opened CUDA's driver.
        missing: parts and steps that gave nothing, with the reason.
    """

    device: str
    card: str | None
    versions: dict[str, str]
    questions: int | None
    same_tokens: int | None
    predicted_is_realised: int | None
    questions_bfloat16: int | None
    same_tokens_bfloat16: int | None
    predicted_is_realised_bfloat16: int | None
    first_token_new_ms: float | None
    first_token_repeated_ms: float | None
    plain_first_token_new_ms: float | None
    plain_first_token_repeated_ms: float | None
    shm_ms: float | None
    nixl_ms: float | None
    inline_ms: float | None
    new_cost: dict[str, Cost | None] | None
    h2d_gb_s: dict[str, float | None] | None
    nixl_gb_s: dict[str, float] | None
    not_engines_with_cuda: list[str] | None
    missing: dict[str, str]
    seconds: float

    @property
    def faults(self) -> list[str]:
        """A sentence for each figure that must not be as it is."""
        found = [f"{name}: {why}" for name, why in self.missing.items()]
        if self.same_tokens != self.questions:
            found.append(f"{self.same_tokens} of {self.questions} answers are plain vLLM's")
        if self.predicted_is_realised != self.questions:
            found.append(f"{self.predicted_is_realised} of {self.questions} predictions are exact")
        if self.predicted_is_realised_bfloat16 != self.questions_bfloat16:
            found.append(
                f"{self.predicted_is_realised_bfloat16} of {self.questions_bfloat16} predictions "
                "are exact in bfloat16"
            )
        return found


def line(
    device: str,
    results: Mapping[str, Result],
    missing: Mapping[str, str],
    versions: Mapping[str, str],
    seconds: float,
) -> Line:
    """Put the results of all parts together.

    Args:
        results: by the name of the part.
        versions: of this project and the libraries; ``kernels`` adds those of the machine.
    """
    kernels = _of(results, "kernels", Kernels)
    copies, reads = _of(results, "h2d", Copies), _of(results, "nixl", Reads)
    fleets = {name: found for name in results if (found := _of(results, name, Fleet))}
    exact, rounded = _counted(fleets, "float32"), _counted(fleets, "bfloat16")
    times = next((fleet.first_tokens for fleet in fleets.values() if fleet.first_tokens), {})
    shm, plain = times.get("shm", NOTHING), times.get("plain", NOTHING)
    gone = dict(missing)
    for name, fleet in fleets.items():
        gone |= {f"{name} {step}": why for step, why in fleet.failed.items()}
    gone |= {f"nixl {kinds}": why for kinds, why in reads.failed.items()} if reads else {}
    return Line(
        device=device,
        card=kernels.card if kernels else None,
        versions={**versions, **(kernels.versions if kernels else {})},
        questions=exact.questions,
        same_tokens=exact.same_tokens,
        predicted_is_realised=exact.predicted_is_realised,
        questions_bfloat16=rounded.questions,
        same_tokens_bfloat16=rounded.same_tokens,
        predicted_is_realised_bfloat16=rounded.predicted_is_realised,
        first_token_new_ms=shm.new_ms,
        first_token_repeated_ms=shm.repeated_ms,
        plain_first_token_new_ms=plain.new_ms,
        plain_first_token_repeated_ms=plain.repeated_ms,
        shm_ms=shm.new_ms,
        nixl_ms=times.get("nixl", NOTHING).new_ms,
        inline_ms=times.get("inline", NOTHING).new_ms,
        new_cost={name: time.new_cost for name, time in times.items()} or None,
        h2d_gb_s=copies.gb_s.get(PICTURE) if copies else None,
        nixl_gb_s=reads.gb_s if reads else None,
        not_engines_with_cuda=_beside_engines(fleets),
        missing=gone,
        seconds=seconds,
    )


def _of(results: Mapping[str, Result], name: str, kind: type[_T]) -> _T | None:
    found = results.get(name)
    return found if isinstance(found, kind) else None


def _counted(fleets: Mapping[str, Fleet], name: str) -> Counted:
    found = fleets[name].answers if name in fleets else None
    if found is None:
        return Counted(None, None, None)
    return Counted(found.questions, found.same_tokens, found.predicted_is_realised)


def _beside_engines(fleets: Mapping[str, Fleet]) -> list[str] | None:
    if not fleets:
        return None
    return sorted({each for fleet in fleets.values() for each in fleet.not_engines_with_cuda})
