"""Run the detectors over the stored rows of a run."""
