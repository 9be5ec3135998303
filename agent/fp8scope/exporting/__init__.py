"""Runs of a server in the forms of other tools: `fp8scope export RUN --to TARGET`. See docs/exporting.md."""
