"""The onset of a harm: a sequential test of a run against its baseline.

`process.advance` is the entry. The alert `above_baseline` and the verdict use it with the same parameters, so
that they agree. Everything here is a pure function of arrays.
"""
