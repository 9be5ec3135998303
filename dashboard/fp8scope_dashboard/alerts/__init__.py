"""Detectors, rules, alert events and their delivery to channels."""
