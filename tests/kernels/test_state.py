"""Scaling state: delayed scaling by hand, odd amax values, and the way through a checkpoint."""

import pytest
import torch

from fp8scope_kernels import E4M3, E5M2, CurrentScaling, DelayedScaling, ScalingState


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


def test_an_amax_of_zero_keeps_the_delayed_scale() -> None:
    state = ScalingState(DelayedScaling(history_length=2), E4M3)
    assert amaxes(state, [2.0, 0.0, 0.0, 0.0, 0.0]) == [2.0] * 5
    state = ScalingState(DelayedScaling(amax_compute="most_recent"), E4M3)
    assert amaxes(state, [2.0, 0.0, 4.0, 1.0]) == [2.0, 2.0, 2.0, 4.0]


def test_an_inf_in_the_history_keeps_the_scale_until_it_has_passed() -> None:
    state = ScalingState(DelayedScaling(history_length=2), E4M3)
    amaxes(state, [2.0])
    state.amax_history[0] = torch.inf
    assert amaxes(state, [3.0, 5.0, 7.0]) == [2.0, 2.0, 5.0]


def test_without_update_nothing_changes() -> None:
    state = ScalingState(DelayedScaling(history_length=2), E4M3)
    assert state.next_scale(torch.tensor(2.0), update=False).item() == E4M3.max / 2
    assert (state.scale.item(), state.calls) == (0.0, 0)
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
def test_current_scaling_looks_at_nothing_else(power_of_two: bool) -> None:
    state = ScalingState(CurrentScaling(power_of_two=power_of_two), E4M3)
    scales = [state.next_scale(torch.tensor(a)).item() for a in (1.0, 100.0, 0.0, torch.inf)]
    assert scales == ([256.0, 4.0, 1.0, 1.0] if power_of_two else [448.0, pytest.approx(4.48), 1.0, 1.0])
    assert state.scale.item() == 1.0
    assert not hasattr(state, "amax_history")


def test_a_checkpoint_brings_everything_back() -> None:
    recipe = DelayedScaling(history_length=4, interval=2)
    state, copy = ScalingState(recipe, E4M3), ScalingState(recipe, E4M3)
    amaxes(state, [1.0, 2.0, 3.0])
    copy.load_state_dict(state.state_dict())
    later = [7.0, 5.0, 1.0, 1.0, 9.0]
    assert amaxes(copy, later) == amaxes(state, later)


def test_a_checkpoint_without_the_state_is_told() -> None:
    state = ScalingState(DelayedScaling(), E4M3)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="amax_history"):
        state.load_state_dict({"scale": torch.tensor(1.0)})


def test_a_checkpoint_of_another_history_length_is_told() -> None:
    state = ScalingState(DelayedScaling(history_length=4), E4M3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        state.load_state_dict(ScalingState(DelayedScaling(history_length=8), E4M3).state_dict())


def test_reset_forgets() -> None:
    state = ScalingState(DelayedScaling(), E4M3)
    amaxes(state, [100.0, 100.0])
    state.reset()
    assert amaxes(state, [1.0]) == [1.0]
    assert state.amax_history.tolist() == [1.0] + [0.0] * 15
