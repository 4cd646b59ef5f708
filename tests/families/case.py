"""A case: a model, and how it is served."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.families.questions import Medium

DEMO = "demo"
"""The maker's name for the model of ``make demo-model``."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        name: unique among all cases.
        maker: name of the function in ``tests/families/makers`` that makes the model.
        media: what it is asked about beside text.
        architecture: of the model; of engine modes, what the model says.
        mode: what is special about the engine, in a few words; empty for the plain family.
        flags: of worker and plain vLLM; ``{dir}`` is the directory in which the model lies.
        both: of frontend and plain vLLM; ``{dir}`` as in ``flags``.
        draft: name of the maker of a draft model, which is made in ``{dir}``, too.
        alone: whether one engine serves all, so that both servers have the same in their caches.
    """

    name: str
    maker: str
    media: frozenset[Medium] = field(default_factory=frozenset)
    architecture: str = ""
    mode: str = ""
    flags: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    draft: str = ""
    alone: bool = True

    @property
    def asked(self) -> frozenset[Medium]:
        return self.media | {"text"}

    def within(self, directory: Path) -> "Case":
        """The same with flags that name this directory."""
        flags, both = (
            tuple(flag.replace("{dir}", str(directory)) for flag in each)
            for each in (self.flags, self.both)
        )
        return replace(self, flags=flags, both=both)
