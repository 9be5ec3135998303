"""Scaling state: delayed scaling by hand, odd amax values, and the way through a checkpoint."""

from typing import Literal

import pytest
import torch

from fp8scope_kernels import E4M3, E5M2, CurrentScaling, DelayedScaling, ScalingState, backends, set_backend
from fp8scope_kernels import scaling_state as state_module


@pytest.fixture(autouse=True, params=["reference", "compiled"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of keeping a state."""
    monkeypatch.setattr(backends, "_cpu_failure", None)
    monkeypatch.setattr(backends, "_chosen", "auto")
    set_backend(request.param)
    return str(request.param)


def amaxes(state: ScalingState, values: list[float]) -> list[float]:
    """The scales for a sequence of amax values, as M / scale: the amax that each scale was made for."""
    scales = [state.next_scale(torch.tensor(value)).item() for value in values]
    return [round(state.format.max / scale, 6) for scale in scales]


def test_it_works() -> None:
    state = ScalingState(DelayedScaling(history_length=2), E4M3)
    # The first call has no past and takes its own; every later scale is made for the two calls before it.
    assert amaxes(state, [1.0, 4.0, 2.0, 0.5, 0.5]) == [1.0, 1.0, 4.0, 4.0, 2.0]
    assert state.amax_history.tolist() == [0.5, 0.5]
    assert state.scale.item() == E4M3.max / 2.0


def test_most_recent() -> None:
    state = ScalingState(DelayedScaling(amax_compute="most_recent"), E5M2)
    assert amaxes(state, [1.0, 4.0, 2.0, 0.5]) == [1.0, 1.0, 4.0, 2.0]


def test_the_history_is_newest_first() -> None:
    state = ScalingState(DelayedScaling(history_length=3), E4M3)
    amaxes(state, [1.0, 2.0, 3.0, 4.0])
    assert state.amax_history.tolist() == [4.0, 3.0, 2.0]


def test_margin_leaves_head_room() -> None:
    state = ScalingState(DelayedScaling(margin=3), E4M3)
    assert state.next_scale(torch.tensor(1.0)).item() == E4M3.max / 8


def test_interval() -> None:
    state = ScalingState(DelayedScaling(history_length=1, interval=3), E4M3)
    assert amaxes(state, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]) == [1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 32.0]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("amax_compute", ["max", "most_recent"])
def test_zeros_do_not_age_the_history(interval: int, amax_compute: Literal["max", "most_recent"]) -> None:
    """An expert without tokens goes on as if it had not been called, however long that lasts."""
    recipe = DelayedScaling(history_length=3, interval=interval, amax_compute=amax_compute)
    state, twin = ScalingState(recipe, E4M3), ScalingState(recipe, E4M3)
    values = [2.0, 8.0, 4.0, 1.0, 1.0, 16.0, 1.0, 1.0]
    expected = amaxes(state, values)
    result: list[float] = []
    for value in values:
        # The first tensor is one of zeros: its scale is 1, which must not be that of the next.
        assert len(amaxes(twin, [0.0] * 4)) == 4
        past = twin.past_scale()
        assert (past is None) == (not result)
        if past is not None:
            twin.remember(torch.tensor(0.0))
        result += amaxes(twin, [value])
    assert result == expected
    assert all(torch.equal(buffer, twin.get_buffer(name)) for name, buffer in state.named_buffers())


def test_an_inf_in_the_history_keeps_the_scale_until_it_has_passed() -> None:
    state = ScalingState(DelayedScaling(history_length=2), E4M3)
    amaxes(state, [2.0])
    state.amax_history[0] = torch.inf
    assert amaxes(state, [3.0, 5.0, 7.0]) == [2.0, 2.0, 5.0]


def test_without_update_nothing_changes() -> None:
    state = ScalingState(DelayedScaling(history_length=2), E4M3)
    assert state.next_scale(torch.tensor(2.0), update=False).item() == E4M3.max / 2
    assert (state.scale.item(), state.calls.item()) == (0.0, 0)
    amaxes(state, [2.0, 4.0])
    before = {key: value.clone() for key, value in state.state_dict().items()}
    assert state.next_scale(torch.tensor(100.0), update=False).item() == E4M3.max / 2
    assert all(torch.equal(value, before[key]) for key, value in state.state_dict().items())


def test_the_scale_handed_out_does_not_change_later() -> None:
    state = ScalingState(DelayedScaling(history_length=1), E4M3)
    first = state.next_scale(torch.tensor(1.0))
    amaxes(state, [8.0, 2.0])
    assert first.item() == E4M3.max


@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling_uses_only_the_current_amax(power_of_two: bool) -> None:
    state = ScalingState(CurrentScaling(power_of_two=power_of_two), E4M3)
    scales = [state.next_scale(torch.tensor(a)).item() for a in (1.0, 100.0, 0.0, torch.inf)]
    assert scales == ([256.0, 4.0, 1.0, 1.0] if power_of_two else [448.0, pytest.approx(4.48), 1.0, 1.0])
    assert state.scale.item() == 1.0
    assert not hasattr(state, "amax_history")


def test_a_checkpoint_restores_everything() -> None:
    recipe = DelayedScaling(history_length=4, interval=2)
    state, copy = ScalingState(recipe, E4M3), ScalingState(recipe, E4M3)
    amaxes(state, [1.0, 2.0, 3.0])
    copy.load_state_dict(state.state_dict())
    later = [7.0, 5.0, 1.0, 1.0, 9.0]
    assert amaxes(copy, later) == amaxes(state, later)


def test_reports_a_checkpoint_without_the_state() -> None:
    state = ScalingState(DelayedScaling(), E4M3)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="amax_history"):
        state.load_state_dict({"scale": torch.tensor(1.0)})


def test_reports_a_checkpoint_of_another_history_length() -> None:
    state = ScalingState(DelayedScaling(history_length=4), E4M3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        state.load_state_dict(ScalingState(DelayedScaling(history_length=8), E4M3).state_dict())


def test_reset_forgets() -> None:
    state = ScalingState(DelayedScaling(), E4M3)
    amaxes(state, [100.0, 100.0])
    state.reset()
    assert amaxes(state, [1.0]) == [1.0]
    assert state.amax_history.tolist() == [1.0] + [0.0] * 15


def test_a_nan_in_the_history_keeps_the_scale_until_it_has_passed() -> None:
    state = ScalingState(DelayedScaling(history_length=3), E4M3)
    amaxes(state, [2.0, 2.0])
    state.amax_history[1] = torch.nan
    assert amaxes(state, [3.0, 5.0, 7.0]) == [2.0, 2.0, 5.0]


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3e38])
@pytest.mark.parametrize("margin", [-64, 0, 64])
def test_scales_stay_normal(amax: float, margin: int) -> None:
    state = ScalingState(DelayedScaling(margin=margin), E4M3)
    scales = [state.next_scale(torch.tensor(amax)).item() for _ in range(2)]
    expected = min(max(448.0 * 2.0**-margin / torch.tensor(amax).item(), 2.0**-126), torch.finfo().max)
    assert scales == [pytest.approx(expected, rel=1e-7)] * 2
    assert scales[0] == scales[1]


# --- the count, on the device ---------------------------------------------------------------------------


def test_the_count_is_a_buffer() -> None:
    """So that it moves with the model, is saved with it, and is counted by a replayed graph."""
    state = ScalingState(DelayedScaling(), E4M3)
    assert state.calls.dtype == torch.int64 and state.calls.shape == ()
    count = state.calls
    amaxes(state, [1.0, 2.0, 3.0])
    state.next_scale(torch.tensor(9.0), update=False)
    assert state.calls is count
    assert state.state_dict()["calls"].item() == 3
    assert "calls" not in ScalingState(CurrentScaling(), E4M3).state_dict()


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_uses_the_devices_count_after_a_graph_replay(interval: int) -> None:
    """As after the replay of a graph: what comes next goes by the count on the device."""
    recipe = DelayedScaling(history_length=4, interval=interval)
    state, twin = ScalingState(recipe, E4M3), ScalingState(recipe, E4M3)
    values = [1.0, 8.0, 2.0, 32.0, 4.0]
    amaxes(state, values)
    amaxes(twin, values[:1])
    for name, buffer in state.named_buffers():
        twin.get_buffer(name).copy_(buffer)
    later = [3.0, 64.0, 1.0, 1.0]
    assert amaxes(twin, later) == amaxes(state, later)


def test_captured_from_the_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not take a call for done that is only captured; what it launches decides by the count."""
    recipe = DelayedScaling(history_length=2, interval=2)
    values = [1.0, 4.0, 2.0, 0.5, 0.5, 8.0, 8.0]
    state, twin = ScalingState(recipe, E4M3), ScalingState(recipe, E4M3)
    expected = amaxes(state, values)
    with monkeypatch.context() as capturing:
        capturing.setattr(state_module, "_is_capturing", lambda like: True)
        assert amaxes(twin, values[:5]) == expected[:5]
        assert twin.past_scale() is None
    assert amaxes(twin, values[5:]) == expected[5:]
    assert twin.past_scale() is not None


def test_the_scale_does_not_depend_on_the_tensor() -> None:
    """`past_scale` and `remember` are `next_scale` in two parts."""
    recipe = DelayedScaling(history_length=3, interval=2)
    state, twin = ScalingState(recipe, E4M3), ScalingState(recipe, E4M3)
    amaxes(state, [1.0])
    amaxes(twin, [1.0])
    for value in (4.0, 2.0, 0.5, 16.0, 1.0):
        scale = twin.past_scale()
        assert scale is not None
        assert scale.inverse == 1 / scale.scale
        assert scale.scale.item() == state.next_scale(torch.tensor(value)).item()
        twin.remember(torch.tensor(value))
    assert torch.equal(state.amax_history, twin.amax_history)
    assert torch.equal(state.calls, twin.calls)


# --- dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype_keeps_its_scales(dtype: torch.dtype) -> None:
    state, twin = (ScalingState(DelayedScaling(history_length=2), E4M3) for _ in range(2))
    amaxes(state, [1.2345678, 3.0])
    amaxes(twin, [1.2345678, 3.0])
    state.to(dtype)
    assert {name: b.dtype for name, b in state.named_buffers()} == {
        "scale": torch.float32, "amax_history": torch.float32, "calls": torch.int64
    }  # fmt: skip
    assert amaxes(state, [2.0, 5.0]) == amaxes(twin, [2.0, 5.0])


def test_still_moves_to_another_device() -> None:
    state = ScalingState(DelayedScaling(), E4M3).to("meta", torch.bfloat16)
    assert {b.device.type for b in state.buffers()} == {"meta"}
    assert state.to_empty(device="cpu").amax_history.dtype == torch.float32


def test_restores_the_dtype_of_assigned_buffers() -> None:
    """`assign=True` takes the checkpoint's own tensors, which the compiled kernels must not misread."""
    state, twin = (ScalingState(DelayedScaling(history_length=2), E4M3) for _ in range(2))
    amaxes(state, [4.0, 2.0])
    twin.load_state_dict({k: v.double() for k, v in state.state_dict().items()}, assign=True)
    assert amaxes(twin, [1.0, 8.0, 1.0]) == amaxes(state, [1.0, 8.0, 1.0])
