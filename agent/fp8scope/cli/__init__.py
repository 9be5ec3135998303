"""The `fp8scope` command: one module for each subcommand."""
