"""The frontend: vLLM's OpenAI server whose engine is a fleet of workers."""
