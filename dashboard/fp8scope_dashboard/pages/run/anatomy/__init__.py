"""The anatomy of a step: its parts over the steps, what it waits for, and how ranks differ."""
