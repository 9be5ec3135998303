"""The diagnosis of an FP8 run in trouble.

The steps that practice takes, each with its evidence, and one conclusion.
"""
