"""Media of runs: beside each other, step by step."""
