"""Evaluation scores of every item, as the agents sent them."""
