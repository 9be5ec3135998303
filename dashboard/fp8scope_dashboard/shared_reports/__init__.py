"""Reports that are frozen when they are made, and the links that show them without an account."""
