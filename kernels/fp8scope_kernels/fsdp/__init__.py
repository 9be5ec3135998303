"""FSDP2 with FP8 all-gather: weights are quantised as shards, and travel as FP8 bytes."""
