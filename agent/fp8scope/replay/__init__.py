"""Runs a step of an incident again, in FP8 and in BF16."""
