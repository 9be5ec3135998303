"""The object store of old values: files that never change, ranges of them, and a cache on the local disk."""
