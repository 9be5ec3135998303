"""What another format or scale would do to a run's tensors, computed from their exponent histograms."""
