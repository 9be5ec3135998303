"""Certificates: a verdict on a loss in a signed file, which carries the curves that it was computed from.

`document.make` computes and signs; `verification.verify` checks a file without a server. Only `stored_runs`
needs Django.
"""
