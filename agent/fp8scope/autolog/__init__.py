"""Finds the steps and losses of an ordinary training loop."""
