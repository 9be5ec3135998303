"""The subcommands that read from a server: runs, show, compare, tail, alerts, open and completion."""
