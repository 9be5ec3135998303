"""The page of evaluation scores."""
