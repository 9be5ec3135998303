"""Collects what a step has shown: tensor statistics, times, rates."""
