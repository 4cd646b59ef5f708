"""Requests with media that nobody would send, against engines of tiny families: none may end."""
