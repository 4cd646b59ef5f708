"""The worker's end of the request plane: sessions, requests, their media, and load reports."""
