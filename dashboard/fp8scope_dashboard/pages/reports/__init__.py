"""Frozen reports, and the links that share them."""
