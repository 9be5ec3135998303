"""Pure functions of numbers and arrays that analysis, diagnosis and alerts have in common."""
