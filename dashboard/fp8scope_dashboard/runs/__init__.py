"""Runs, their writers and their tensor catalogues."""
