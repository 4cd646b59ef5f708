"""Architectures of vLLM's registry that no tiny random model is made of, each with its reason."""

UNBUILT: dict[str, str] = {}
