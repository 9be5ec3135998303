"""Live updates: the event streams that tell an open page what has changed."""
