"""Certificates as pages: one sheet of paper, and the files of a run's certificate."""
