"""Numbers and verdicts as text. Knows no other part of the dashboard: every function takes plain values."""
