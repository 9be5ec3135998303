"""The post-mortem of a run or of an incident."""
