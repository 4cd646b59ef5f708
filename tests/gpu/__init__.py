"""mmrouter beside plain vLLM on a real GPU: see README.md."""
