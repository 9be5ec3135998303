"""Imports of uploaded files of other tools: a job runs the agent's importer as a process with limits."""
