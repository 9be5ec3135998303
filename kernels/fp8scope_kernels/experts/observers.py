"""Binds the FP8 products of experts to a statistics buffer."""

from collections.abc import Iterable

from fp8scope_kernels.experts.products import ExpertProducts
from fp8scope_kernels.experts.statistics import ExpertSlots
from fp8scope_kernels.recipes import ROLES, Role
from fp8scope_kernels.statistics import Slot, StatisticsBuffer

EXPERT_TENSORS = 2048
"""The most tensors of single experts that have rows by default: 8 experts in 32 layers need 1,536."""


def tensors_of_experts(experts: Iterable[tuple[str, ExpertProducts]]) -> int:
    """The number of tensors of single experts: three for each."""
    return sum(len(ROLES) * products.experts for _, products in experts)


def observe_experts(path: str, products: ExpertProducts, buffer: StatisticsBuffer, *, singly: bool) -> int:
    """Bind three rows for all experts, and with `singly` three for each; returns their number.

    Names are `<path>.<input|weight|grad_output>` and `<path>.expert_<number>.<...>`.
    """
    shapes: dict[Role, tuple[int, ...]] = {
        "input": (-1, products.in_features),
        "weight": products.shape,
        "grad_output": (-1, products.out_features),
    }
    layer = {role: _register(path, products, role, shapes[role], buffer) for role in ROLES}
    single: dict[Role, list[Slot]] = {role: [] for role in ROLES}
    # The rows of a role are next to each other.
    for role in ROLES if singly else ():
        shape = shapes[role][1:] if role == "weight" else shapes[role]
        for expert in range(products.experts):
            name = f"{path}.expert_{expert}" if path else f"expert_{expert}"
            single[role].append(_register(name, products, role, shape, buffer))
    products.slots.update({role: ExpertSlots(layer[role], tuple(single[role])) for role in ROLES})
    return len(ROLES) * (1 + (products.experts if singly else 0))


def _register(
    path: str, products: ExpertProducts, role: Role, shape: tuple[int, ...], buffer: StatisticsBuffer
) -> Slot:
    name = f"{path}.{role}" if path else role
    return buffer.register(name, format=products.state_of(role).format, shape=shape, role=role)
