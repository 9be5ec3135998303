"""Panels that people arrange: charts of any logged scalars on the page of a run."""
