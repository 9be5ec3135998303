"""Callbacks for trainers that own the training loop; each module imports its trainer's package."""
