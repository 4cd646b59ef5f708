"""What depends on vLLM's version: its platform, flags, arguments, features and patches."""
