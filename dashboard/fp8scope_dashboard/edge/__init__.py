"""The HTTP edge before Django: it admits requests by their headers, and shares the threads among callers."""
