"""Tasks, threads, child processes and their messages, signals and cleanup."""
