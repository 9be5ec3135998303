"""Detectors, rules, alerts and their delivery to channels."""
