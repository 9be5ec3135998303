"""Describes the run's environment: host, versions and git, with secrets removed."""
