"""Evaluates one checkpoint in several precisions: `evaluate_matrix`.

`layers` chooses the layers and replaces their forward passes, `columns` builds these for each precision,
`scores` reads what the user's function returns, and `matrix` evaluates one precision after another.
"""
