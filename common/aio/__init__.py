"""Tasks, threads, signals and cleanup that outlive one call."""
