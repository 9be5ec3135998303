"""The page of one run: its head, its tabs and what they show."""
