"""The messages that are stored: (run, writer, seq) at most once."""
