"""The request plane: cards, messages, frames, sockets, and the states of a request."""
