"""Which messages are stored: (run, writer, seq) at most once."""
