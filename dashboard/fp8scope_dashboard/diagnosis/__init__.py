"""Why an FP8 run is in trouble: the steps that practice takes, each with its evidence, and one conclusion."""
