"""vLLM's engine: its configuration, its calls, its outputs and its media."""
