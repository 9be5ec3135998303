"""Ctrl-C at a chosen point of the agent's code, at which Python would deliver it."""

import dis
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fp8scope

AGENT = str(Path(fp8scope.__file__).parent)
# The interpreter looks for signals after these instructions, and at no others.
LOOKS_FOR_SIGNALS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}


class Interrupter:
    """Raises KeyboardInterrupt at point number `at` of the agent's code that `call` runs on this thread."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.places: list[str] = []
        """The points that were reached, as `file:line`, from number 1 on."""
        self._last: dict[FrameType, str] = {}
        self._instructions: dict[CodeType, dict[int, str]] = {}

    def call(self, function: Callable[[], object]) -> KeyboardInterrupt | None:
        """Call `function` and return what interrupted it."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            function()
        except KeyboardInterrupt as interrupt:
            return interrupt
        finally:
            sys.settrace(before)
        return None

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(AGENT):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._follow

    def _follow(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = self._instruction(frame)
            if last in LOOKS_FOR_SIGNALS:
                self.places.append(f"{frame.f_code.co_filename.removeprefix(AGENT)}:{frame.f_lineno}")
                if len(self.places) == self.at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._follow

    def _instruction(self, frame: FrameType) -> str:
        code = frame.f_code
        if code not in self._instructions:
            self._instructions[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
        return self._instructions[code].get(frame.f_lasti, "")


def points_to_try(places: list[str], files: tuple[str, ...], every: int) -> list[int]:
    """Numbers of points: the first of each line of `files`, and each `every`th of the others."""
    seen: Counter[str] = Counter()
    points = []
    for number, place in enumerate(places, 1):
        seen[place] += 1
        is_near = place.partition(":")[0] in files
        if (is_near and seen[place] == 1) or (not is_near and number % every == 0):
            points.append(number)
    return points
