"""Routes for operators: status, metrics, history and operations."""
