"""Runs as CSV and Parquet files."""
