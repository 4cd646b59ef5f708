"""What several test modules share: stand-ins, makers of input, and what both ends are made of."""
