"""Commands, precision fallback, BF16 reference windows and bisection."""
