"""The soak: what becomes of users' requests while everything around them breaks."""
