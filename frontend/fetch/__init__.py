"""Getting media that a request refers to: safely, off the event loop, and once."""
