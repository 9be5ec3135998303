"""Plans of a training over devices: splits of pipelines, and the time of a step by its transfers."""
