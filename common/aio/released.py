"""Base class of what ``with`` releases at its end."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Released(ABC):
    """Something held until :meth:`release`, at the latest until the end of a ``with``."""

    @abstractmethod
    def release(self) -> None:
        """Give it back. The second and later calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
