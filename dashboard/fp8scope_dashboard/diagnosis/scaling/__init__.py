"""The scaling of FP8 tensors: scales that do not follow, tensors that leave their range, the loss scale."""
