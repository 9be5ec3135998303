"""Prometheus: the latest values of runs, sent by remote write."""
