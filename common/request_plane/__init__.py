"""The request plane: cards, messages, frames and sockets between frontends and workers."""
