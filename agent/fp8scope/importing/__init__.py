"""Reads the files of other tools and sends them as runs; nothing that a file contains is ever executed."""
