"""The flight recorder: the last steps in full, kept as an incident when a run fails or diverges."""
