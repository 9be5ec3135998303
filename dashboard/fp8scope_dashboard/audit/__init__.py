"""The record of what people, tokens and commands changed in a project."""
