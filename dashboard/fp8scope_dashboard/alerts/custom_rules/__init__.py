"""Rules that people write: their documents, files and trials on past runs."""
