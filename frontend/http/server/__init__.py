"""vLLM's OpenAI app, the server that runs it, and the routes that differ here."""
