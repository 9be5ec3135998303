"""Plotly figures, as pure functions of arrays."""
