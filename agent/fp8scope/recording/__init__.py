"""Writes what was observed to the spool, a local file."""
