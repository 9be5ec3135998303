"""Commands to training processes, and the reports that come back."""
