"""Files of runs: images, texts, tables and others at a step, one copy of each content in a project."""
