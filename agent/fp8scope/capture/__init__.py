"""Records what a script gives to other trackers (wandb, TensorBoard, MLflow, ...), without changing it.

`capture` records values, `trackers` replaces the trackers' functions while that is wanted, and `active` knows
the capture of this process. docs/capture.md describes it for users.
"""
