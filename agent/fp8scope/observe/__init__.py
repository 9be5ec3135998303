"""Collects the measurements of a step: tensor statistics, times and rates."""
