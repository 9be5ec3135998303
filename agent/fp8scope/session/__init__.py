"""A run's writers and steps: from the end of a step to the recorder."""
