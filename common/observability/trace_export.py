"""Traces that go to a collector, where ``--otlp-traces-endpoint`` asks for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ConfigurationError


@contextmanager
def exporting(endpoint: str | None, instance: str) -> Iterator[None]:
    """Trace inside of this; without an endpoint nothing happens.

    Args:
        endpoint: one that :func:`prepare` has taken.
        instance: which process of its role this is.
    """
    if endpoint is None:
        yield
        return
    from common.observability.otel import Export

    export = Export(endpoint, instance)
    try:
        yield
    finally:
        export.close()


def prepare(endpoint: str | None, role: str) -> None:
    """See, before anything is started, that spans can be exported; and let vLLM's, in this process
    and its children, go the same way under the same name.

    Args:
        role: ``frontend`` or ``worker``.

    Raises:
        ConfigurationError: they can't be.
    """
    if endpoint is None:
        return
    try:
        from common.observability.otel import prepare_environment
    except ImportError as error:
        raise ConfigurationError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from error
    prepare_environment(endpoint, role)
