"""The effect of another format or scale on a run's tensors, computed from their exponent histograms."""
