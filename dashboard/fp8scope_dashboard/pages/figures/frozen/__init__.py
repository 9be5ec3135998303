"""Figures as SVG, without a browser: for reports, which stay as they are and are printed.

It draws what this dashboard's figures consist of: lines, markers, bands, error bars, shapes, heat maps and
their axes, from plotly's JSON.
"""
