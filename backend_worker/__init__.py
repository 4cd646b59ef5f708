"""The worker: one AsyncLLM behind the request plane."""
