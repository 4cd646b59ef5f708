"""Media on their way from encoded bytes to tensors, each once."""
