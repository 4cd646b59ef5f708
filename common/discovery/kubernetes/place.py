"""Where cards are in a cluster, and who we are there. Needs no client."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from common.errors import ConfigurationError

_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DNS: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAMESPACE: Final = re.compile(_DNS)
_KEY: Final = re.compile(rf"(?:(?=[^/]{{1,253}}/){_DNS}(?:\.{_DNS})*/)?{_LABEL}")
_VALUE: Final = re.compile(rf"(?:{_LABEL})?")


@dataclass(frozen=True)
class KubernetesAccess:
    """How to find the API server.

    Attributes:
        kubeconfig: a file that says it; None for the service account of this Pod, else for the file
            that kubectl would take.
        context: of that file; None for its current one.
    """

    kubeconfig: Path | None = None
    context: str | None = None


class Pod(NamedTuple):
    """The Pod in which we run."""

    name: str
    uid: str

    @classmethod
    def ours(cls, namespace: str) -> "Pod | None":
        """As the downward API says it; None unless it is in this namespace, since an owner
        elsewhere counts as one that is gone.
        """
        names = ("POD_NAME", "POD_UID", "POD_NAMESPACE")
        name, uid, where = (os.environ.get(each, "") for each in names)
        return cls(name, uid) if name and uid and where == namespace else None


def check_namespace(name: str) -> str:
    """Raises ConfigurationError."""
    if "@" in name:  # before it may stand a password
        raise ConfigurationError("no user belongs before a namespace")
    if not _NAMESPACE.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no namespace")
    return name


def labels_of(selector: str) -> dict[str, str]:
    """The labels that a selector asks for, and that our own Leases have for that reason.

    Raises:
        ConfigurationError: it is none, or one that labels can't be made from.
    """
    labels: dict[str, str] = {}
    for term in selector.split(","):
        key, equals, value = term.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ConfigurationError(f"{term!r} is no LABEL=VALUE")
        if key in labels:
            raise ConfigurationError(f"it has the label {key!r} twice")
        labels[key] = value
    return labels
