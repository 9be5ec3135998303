"""One module a format. Each has a FORMAT, which says how it is recognised and read."""
