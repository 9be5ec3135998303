"""Run the detectors over the stored rows of a run, and gather what their findings rest on."""
