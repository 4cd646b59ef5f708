"""Extensions of installed packages, by entry points: router modes and media rules.

Nothing of a package is imported before its class is needed.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Final, TypeVar

from common.errors import ConfigurationError

ROUTER_MODES: Final = "mmrouter.router_modes"
"""Subclasses of ``RouterMode``, each by the name that ``--router-mode`` takes."""
MEDIA_RULES: Final = "mmrouter.media_rules"
"""Subclasses of ``MediaRule``. All that are installed hold."""

T = TypeVar("T")


def names_of(group: str) -> list[str]:
    """Return the names of a group's entry points, sorted, without importing anything."""
    return sorted(entry_points(group=group).names)


def load(group: str, name: str, base: type[T]) -> type[T]:
    """Import the class behind an entry point. Raises ConfigurationError: the name is ambiguous, the
    import fails, or it is no subclass of ``base``."""
    found = sorted(entry_points(group=group, name=name), key=_package)
    packages = " and ".join(_package(one) for one in found)
    if len(found) > 1:
        raise ConfigurationError(f"{packages} both have {name!r} in {group}: uninstall one")
    try:
        loaded = found[0].load()
    except Exception as error:  # a foreign module may raise anything
        raise ConfigurationError(
            f"{name!r} of {packages} ({group}) can't be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigurationError(
            f"{name!r} of {packages} ({group}) is no subclass of {base.__name__}"
        )
    return loaded


def _package(found: EntryPoint) -> str:
    return found.dist.name if found.dist else found.value
