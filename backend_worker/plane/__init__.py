"""The worker's end of the request plane."""
