"""The table of capabilities, and what follows from it for layers that move between devices."""

from types import SimpleNamespace

import pytest
import torch

from fp8scope_kernels import E4M3, E4M3FNUZ, CurrentScaling, DelayedScaling, ScalingState, devices
from fp8scope_kernels.devices import look_up
from fp8scope_kernels.matmul import can_multiply


@pytest.mark.parametrize(
    ("platform", "architecture", "encoding", "units"),
    [
        ("rocm", "gfx942", "fnuz", "row tensor"),
        ("rocm", "gfx940", "fnuz", "row tensor"),
        ("rocm", "gfx950", "ocp", "row tensor"),
        ("rocm", "gfx1201", "ocp", "row tensor"),
        ("rocm", "gfx90a", "ocp", ""),
        ("rocm", "gfx1100", "ocp", ""),
        ("cuda", "sm_80", "ocp", ""),
        ("cuda", "sm_89", "ocp", "row tensor"),
        ("cuda", "sm_90", "ocp", "1x128 row tensor"),
        ("cuda", "sm_100", "ocp", "1x32 row tensor"),
        ("cuda", "sm_103", "ocp", "1x32 row tensor"),
        ("cuda", "sm_120", "ocp", "row tensor"),
        ("xpu", "", "ocp", ""),
        ("musa", "mp_31", "ocp", ""),
        ("cpu", "", "ocp", ""),
        ("a device of tomorrow", "x1", "ocp", ""),
    ],
)
def test_it_works(platform: str, architecture: str, encoding: str, units: str) -> None:
    capabilities = look_up(platform, architecture)
    assert capabilities.encoding == encoding
    assert sorted(capabilities.units) == units.split()


def test_amds_devices_are_told_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls them `cuda`; the name of the architecture has its features behind colons."""
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    module = SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(devices, "module_of", lambda device: module)
    device = torch.device("cuda", 0)
    assert (devices.platform_of(device), devices.architecture_of(device)) == ("rocm", "gfx942")


def test_a_cpu_is_no_accelerator() -> None:
    cpu = torch.device("cpu")
    assert not devices.is_accelerator(cpu) and not devices.can_pin(cpu) and not devices.is_capturing(cpu)
    assert devices.capabilities_of(torch.device("meta")) == devices.capabilities_of(cpu)
    values = torch.ones(3)
    assert devices.to_device(values, cpu) is values


def test_a_state_that_moves_follows_the_formats_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one machine's formats to the other's and back: the scale follows the maximum."""
    state = ScalingState(DelayedScaling(interval=100), E4M3)
    amax = torch.tensor(3.0)
    assert state.next_scale(amax) == torch.tensor(448.0) / 3
    monkeypatch.setattr("fp8scope_kernels.recipes.capabilities_of", lambda device: devices.FNUZ_UNITS)
    state.to(torch.float32)
    assert state.format is E4M3FNUZ
    torch.testing.assert_close(state.next_scale(amax), torch.tensor(80.0))
    monkeypatch.undo()
    state.to(torch.float32)
    assert state.format is E4M3
    torch.testing.assert_close(state.next_scale(amax), torch.tensor(448.0) / 3)


def test_a_recipe_with_an_encoding_of_its_own_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8scope_kernels.recipes.capabilities_of", lambda device: devices.FNUZ_UNITS)
    assert ScalingState(CurrentScaling(fp8_encoding="ocp"), E4M3).format is E4M3
    assert ScalingState(CurrentScaling(), E4M3).format is E4M3FNUZ


def test_units_multiply_either_pair_of_formats() -> None:
    assert can_multiply(E4M3FNUZ, E4M3FNUZ) and can_multiply(E4M3, E4M3)
