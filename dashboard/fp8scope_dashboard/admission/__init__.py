"""The HTTP edge before Django: requests are admitted by their headers."""
