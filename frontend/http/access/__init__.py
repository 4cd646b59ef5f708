"""API keys, admin access and CORS."""
