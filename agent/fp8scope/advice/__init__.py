"""Advice on how a training could be faster: checks of a recorded run, one a practice."""
