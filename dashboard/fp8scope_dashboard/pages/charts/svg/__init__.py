"""Figures as SVG, drawn on the server."""

from fp8scope_dashboard.pages.charts.svg.drawing import MAX_POINTS, svg_of, text_svg
from fp8scope_dashboard.pages.charts.svg.pen import colour_names

__all__ = ["MAX_POINTS", "colour_names", "svg_of", "text_svg"]
