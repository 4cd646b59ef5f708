"""Code that depends on vLLM's version: platform, flags, arguments, features and patches."""
