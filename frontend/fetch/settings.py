"""Settings of media loading; vLLM's own two on allowed origins apply as well."""

import argparse
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

from pydantic import Field

from common.cli.flag_settings import FlagSettings
from common.extensions import MEDIA_RULES, load, names_of
from frontend.media_limits import FetchPolicy, MediaRule

_FROM_VLLM = {
    "allowed_domains": "allowed_media_domains",
    "local_root": "allowed_local_media_path",
}


class MediaSettings(FetchPolicy, FlagSettings):
    """The policy, and the size of the cache."""

    flag_group: ClassVar[str] = "media"
    flag_prefix: ClassVar[str] = "media-"
    not_flags: ClassVar[frozenset[str]] = frozenset({*_FROM_VLLM, "rules"})

    cache_mb: float = Field(
        256.0,
        ge=0.0,
        le=1e9,
        allow_inf_nan=False,
        description="memory for media kept decoded, so that a repeated one needs no decoding; 0 "
        "keeps none",
    )

    @property
    def cache_bytes(self) -> int:
        return int(self.cache_mb * 2**20)

    def shared_by(self, processes: int) -> Self:
        """Return each process's share: no less than one request may use."""
        one_mb = min(self.max_request_mb, self.held_mb)
        one_megapixels = min(self.max_request_megapixels, self.decoding_megapixels)
        return self.model_copy(
            update={
                "held_mb": max(self.held_mb / processes, one_mb),
                "decoding_megapixels": max(self.decoding_megapixels / processes, one_megapixels),
                "cache_mb": self.cache_mb / processes,
            }
        )

    @classmethod
    def with_vllms(
        cls,
        args: argparse.Namespace,
        serve: argparse.Namespace,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Extend :meth:`from_args` by vLLM's flags. Raises ConfigurationError, naming the place of
        an unusable value.
        """
        theirs: dict[str, tuple[str, object]] = {
            name: ("--" + attribute.replace("_", "-"), value)
            for name, attribute in _FROM_VLLM.items()
            if (value := getattr(serve, attribute))
        }
        theirs["rules"] = (MEDIA_RULES, tuple(_installed_rules()))
        return cls.from_args(args, environ, theirs)


def _installed_rules() -> Iterator[MediaRule]:
    for name in names_of(MEDIA_RULES):
        yield load(MEDIA_RULES, name, MediaRule)()  # type: ignore[type-abstract]
