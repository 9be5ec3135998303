"""The training process of `fp8scope demo`: a small byte-level GPT, in BF16 or FP8, on the CPU."""
