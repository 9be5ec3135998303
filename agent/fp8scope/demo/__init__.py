"""What one training process of `fp8scope demo` does: a small byte-level GPT, in BF16 or FP8, on the CPU."""
