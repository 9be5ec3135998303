"""Traces of chosen steps: the file that Perfetto opens, and the table of where the step's time went."""

from fp8scope.observe.traces.step_traces import MAX_TRACES, StepTraces

__all__ = ["MAX_TRACES", "StepTraces"]
