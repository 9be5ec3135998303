"""What users, checkpoints and other code see of weights that FSDP2 gathers in FP8."""

import copy
import io
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.fsdp_training import (
    Setup,
    batch,
    different,
    everything,
    make,
    make_model,
    shard,
    train,
    whole,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fp8scope_kernels import (
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    fp8_layers,
    gather_weights_in_fp8,
    observe,
    revert,
)
from fp8scope_kernels.fsdp.gathered_weight import Gathered, GatheredWeight

NAMES = ("0.up", "0.down", "1.up", "1.down", "2")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are called inside of it, and the elements of each dtype that travel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.gathered: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            self.calls[name] += 1
            if "allgather" in name:
                own = args[1][0] if isinstance(args[1], list) else args[1]
                self.gathered[own.dtype] += own.numel()
        return func(*args, **(kwargs or {}))


def one_pass(model: Any, rank: int, step: int = 0) -> Collectives:
    collectives = Collectives()
    with collectives:
        model(batch(rank, step)).square().mean().backward()
    return collectives


def job_collectives(rank: int, size: int) -> list[Any]:
    setup = Setup(recipe=CurrentScaling(), policy=MIXED)
    (plain, _), (model, _) = make(setup, in_fp8=False), make(setup, in_fp8=True)
    results = []
    for own in (plain, model):
        collectives = one_pass(own, rank)
        results.append((dict(collectives.calls), dict(collectives.gathered)))
    return results


def test_it_works() -> None:
    """Two small all-reduces for all weights of a forward pass; a byte for each of their elements travels."""
    parameters = sum(p.numel() for p in make_model(Setup(recipe=CurrentScaling())).parameters())
    for (before, bf16), (after, fp8) in run_ranks(job_collectives, 2):
        assert after.pop("allreduce_") == 2
        assert after == before
        # Blocks are gathered in both passes, the outermost group in one.
        assert set(bf16) == {torch.bfloat16}
        in_blocks, at_the_end = parameters - 32 * 33, 32 * 33
        assert bf16[torch.bfloat16] * 2 == 2 * in_blocks + at_the_end
        assert set(fp8) == {torch.uint8}
        others = 2 * (2 * 32 + 64)
        assert fp8[torch.uint8] * 2 == 2 * (4 * 32 * 64 + 2 * others) + (32 * 32 + 2 * 32)


def first_layer(model: Any) -> Any:
    return model[0].up


def job_state(rank: int, size: int, folder: str) -> list[str]:
    """Checkpoints are those of a model that gathers its weights as they are."""
    setup = Setup(recipe=DelayedScaling(history_length=2))
    (plain, _), (model, _) = make(setup, in_fp8=False), make(setup, in_fp8=True)
    train(plain, rank, setup)
    train(model, rank, setup)
    found = []
    for name, state in (
        ("state_dict", model.state_dict()),
        ("get_model_state_dict", get_model_state_dict(model)),
        ("keep_vars", model.state_dict(keep_vars=True)),
    ):
        expected = plain.state_dict()
        if list(state) != list(expected):
            found.append(f"{name}: keys")
        for key, value in state.items():
            if type(whole(value)) is not Tensor or not torch.equal(whole(value), whole(expected[key])):
                found.append(f"{name}: {key} is {value}")
        stored = io.BytesIO()
        torch.save({key: getattr(value, "_local_tensor", value) for key, value in state.items()}, stored)
        if b"weight_shards" in stored.getvalue():
            found.append(f"{name}: the file has more than tensors")
    copied = copy.deepcopy(first_layer(model).weight._local_tensor)
    if getattr(copied, "fsdp_pre_all_gather", None) is not None:
        found.append("a copy of a part belongs to the layer")
    write(get_model_state_dict(model), checkpoint_id=folder)
    found += restored(rank, setup, folder)
    found += replaced(rank, setup)
    return found


def restored(rank: int, setup: Setup, folder: str) -> list[str]:
    """A checkpoint, read by both kinds of model. Both go on alike."""
    outputs = []
    for in_fp8 in (False, True):
        model, rows = make(setup, in_fp8=in_fp8)
        train(model, rank, setup, steps=1)
        state = get_model_state_dict(model)
        read(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
        outputs.append((train(model, rank, setup, steps=2, first=4), everything(model, rows)))
    found = different(outputs[0][1], outputs[1][1])
    return (
        found if outputs[0][0] == outputs[1][0] else [*found, f"losses {outputs[1][0]} for {outputs[0][0]}"]
    )


def replaced(rank: int, setup: Setup) -> list[str]:
    """Parameters that loading replaces between steps."""
    results = []
    for in_fp8 in (False, True):
        model, rows = make(setup, in_fp8=in_fp8)
        losses = train(model, rank, setup, steps=2)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        losses += train(model, rank, setup, steps=2, first=2)
        results.append((losses, everything(model, rows)))
    found = different(results[0][1], results[1][1])
    if results[0][0] != results[1][0]:
        found.append(f"losses {results[1][0]} for {results[0][0]}")
    return [f"assigned: {line}" for line in found]


def test_checkpoints_have_the_weights_as_they_are(tmp_path: Path) -> None:
    for found in run_ranks(job_state, 2, str(tmp_path)):
        assert found == []


def job_other_ranks(rank: int, size: int, folder: str) -> list[float]:
    """Reads a checkpoint of two ranks; every rank has the same data."""
    setup = Setup(recipe=DelayedScaling(history_length=2))
    model, _ = make(setup, in_fp8=True)
    if size == 2:
        train(model, 0, setup)
        write(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(model)
    read(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return train(model, 0, setup, steps=2, first=4)


def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    losses = [*run_ranks(job_other_ranks, 2, str(tmp_path)), *run_ranks(job_other_ranks, 4, str(tmp_path))]
    assert losses == [losses[0]] * 6


def job_reading(rank: int, size: int) -> list[Any]:
    """Code that reads a weight during a forward pass, and one that writes to it."""
    model, _ = make(Setup(recipe=CurrentScaling(), policy=MIXED), in_fp8=True)
    results: list[Any] = []

    def hook(layer: Any, inputs: Any, output: Any) -> None:
        weight = layer.weight
        scale = layer.state_of("weight").scale
        norm = weight.detach().norm().item()
        turned = weight.t() @ torch.ones(64, 1, dtype=weight.dtype)
        results.append((repr(weight), norm, weight.float().abs().max().item() * scale.item(), turned.shape))
        with pytest.raises(TypeError, match="cannot be written to"):
            weight.detach().mul_(2)

    first_layer(model).register_forward_hook(hook)
    exact = whole(first_layer(model).weight).bfloat16().norm().item()
    torch.autograd.backward(model(batch(rank, 0)).square().mean())
    return [results, exact, type(first_layer(model).weight).__name__]


def test_other_code_reads_dequantised_numbers() -> None:
    for results, exact, kind in run_ranks(job_reading, 2):
        ((text, norm, largest, shape),) = results
        assert text == "GatheredWeight((64, 32), torch.bfloat16, memory=torch.float8_e4m3fn)"
        assert norm == pytest.approx(exact, rel=0.02)
        assert largest == pytest.approx(448, rel=2**-8)
        assert shape == (32, 1)
        assert kind == "DTensor"


def test_a_gathered_weight_by_itself() -> None:
    data = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    gathered = Gathered(data, torch.tensor(0.5))
    weight: Any = nn.Parameter(torch.as_strided(GatheredWeight(gathered, torch.bfloat16), (2, 2), (2, 1)))
    assert isinstance(weight, GatheredWeight) and weight.requires_grad
    assert weight.dtype == torch.bfloat16
    assert (weight + 0).tolist() == [[0.5, -1.0], [0.25, 224.0]]
    torch.autograd.backward((weight * torch.ones(2, 2)).sum())
    assert weight.grad is not None and weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    # FSDP2 gives the memory other contents.
    gathered.data, gathered.inverse_scale = torch.ones(2, 2, dtype=torch.bfloat16), None
    assert (weight + 0).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    gathered.data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has been freed"):
        weight + 0


def job_switched(rank: int, size: int) -> None:
    """A backward pass after the weights have been gathered in another dtype."""
    model, _ = make(Setup(recipe=CurrentScaling(), reshard_after_forward=True), in_fp8=True)
    loss = model(batch(rank, 0)).square().mean()
    for _, layer in fp8_layers(model):
        layer.precision = "bf16"
    with torch.no_grad():
        model(batch(rank, 1))
    with pytest.raises(RuntimeError, match="has been freed"):
        torch.autograd.backward(loss)


def test_a_change_of_precision_before_a_backward_pass_is_an_error() -> None:
    run_ranks(job_switched, 2)


def job_revert(rank: int, size: int) -> list[str]:
    """`revert` between two steps; both models are then in high precision."""
    setup, found = Setup(recipe=CurrentScaling(), reshard_after_forward=False), []
    models = [make(setup, in_fp8=in_fp8) for in_fp8 in (False, True)]
    for model, rows in models:
        train(model, rank, setup, steps=2)
        with torch.no_grad():
            # Leaves the weights unsharded.
            model(batch(rank, 9))
        if model is models[0][0]:
            everything(model, rows)
        report = revert(model)
        if list(report.converted) != list(NAMES):
            found.append(f"{report.left} were not reverted")
    losses = [train(model, rank, setup, steps=2, first=2) for model, _ in models]
    if losses[0] != losses[1]:
        found.append(f"losses {losses[1]} for {losses[0]}")
    if any("weight_shard" in vars(module) for module in models[1][0].modules()):
        found.append("a layer has a part of it left")
    return found + different(everything(*models[0]), everything(*models[1]))


def test_revert_gathers_weights_as_they_are() -> None:
    for found in run_ranks(job_revert, 2):
        assert found == []


def job_samples(rank: int, size: int) -> list[Any]:
    """Samples of this rank's rows: exponents, and squares of errors and of the signal."""
    results = []
    for in_fp8 in (False, True):
        setup = Setup(recipe=CurrentScaling(), policy=MIXED)
        model, rows = make(setup, in_fp8=in_fp8)
        rows.sampling = True
        torch.autograd.backward(model(batch(rank, 0)).square().mean())
        samples = {
            info.name: row
            for info, row in zip(rows.catalogue, rows.sample_data.tolist(), strict=True)  # type: ignore[union-attr]
        }
        results.append(samples["0.up.weight"])
    return results


def test_each_rank_samples_its_own_rows() -> None:
    ranks = run_ranks(job_samples, 2)
    expected = torch.tensor(ranks[0][0], dtype=torch.float64)
    total = torch.tensor([own for _, own in ranks], dtype=torch.float64).sum(0)
    assert torch.equal(total[2:], expected[2:])
    assert torch.allclose(total[:2], expected[:2], rtol=1e-12, atol=0)


def job_nonfinite(rank: int, size: int) -> list[Any]:
    """A NaN and an Inf in the rows of the last rank."""
    results = []
    for in_fp8 in (False, True):
        setup = Setup(recipe=DelayedScaling(history_length=2))
        model, rows = make(setup, in_fp8=in_fp8)
        if rank == size - 1:
            with torch.no_grad():
                first_layer(model).weight._local_tensor[-1, :2] = torch.tensor([torch.nan, torch.inf])
        output = model(batch(rank, 0))
        names = [info.name for info in rows.catalogue]
        results.append((output.isnan().tolist(), rows.data[names.index("0.up.weight")].tolist()))
    return results


def test_nonfinite_elements_reach_all_ranks() -> None:
    for plain, in_fp8 in run_ranks(job_nonfinite, 2):
        assert plain == in_fp8
        assert in_fp8[1][STATISTICS.index("nonfinite")] == 2


def job_left(rank: int, size: int) -> list[Any]:
    """The paths of the layers that travel in FP8, and what was logged, for each kind of model."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("fp8scope_kernels.fsdp.all_gather")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    results = []
    for recipe in (RowwiseScaling(), MXFP8(), CurrentScaling()):
        model = make_model(Setup(recipe=recipe))
        convert(model, recipe)
        if not isinstance(recipe, CurrentScaling):
            shard(model, Setup(recipe=recipe))
        results.append(gather_weights_in_fp8(model))
    model = make_model(Setup(recipe=CurrentScaling()))
    convert(model, BlockScaling(), include="0.*")
    convert(model, CurrentScaling(), include="[12]*")
    shard(model, Setup(recipe=CurrentScaling()))
    results += [gather_weights_in_fp8(model), gather_weights_in_fp8(model)]
    other = make_model(Setup(recipe=CurrentScaling()))
    convert(other, CurrentScaling())
    fully_shard(other[0], offload_policy=CPUOffloadPolicy(pin_memory=False))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(other[1], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(other[1], mesh=mesh["data"])
    fully_shard(other, reshard_after_forward=2)
    results.append(gather_weights_in_fp8(other))
    return [results, messages]


def test_layers_that_cannot_say_why() -> None:
    for results, messages in run_ranks(job_left, 4):
        assert results == [(), (), (), NAMES[2:], NAMES[2:], ()]
        rows = "Not gathered in FP8: 0.up, 0.down, 1.up and 2 more ({} has scales of rows or blocks)."
        assert messages[:3] == [
            rows.format("RowwiseScaling"),
            rows.format("MXFP8"),
            "Not gathered in FP8: 0.up, 0.down, 1.up and 2 more (not sharded by fully_shard).",
        ]
        assert messages[3] == "Not gathered in FP8: 0.up, 0.down (BlockScaling has scales of rows or blocks)."
        assert messages[-1] == (
            "Not gathered in FP8: 0.up, 0.down (offloaded to the CPU); 1.up, 1.down (sharded by tensor "
            "parallelism, too); 2 (resharded to fewer ranks after the forward pass)."
        )


def job_parts(rank: int, size: int) -> list[str]:
    """FSDP modules that are called by themselves, unsharded by hand, and calls that fail."""
    found = []
    results = []
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        model: Any = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        convert(model, DelayedScaling(history_length=2))
        for layer in model[:2]:
            fully_shard(layer)
        if in_fp8 and gather_weights_in_fp8(model) != ("0", "1"):
            found.append("layers by themselves do not travel in FP8")
        rows = StatisticsBuffer()
        observe(model, rows)
        outputs = []
        for step in range(3):
            x = batch(rank, step)
            model[0].unshard()
            with pytest.raises(RuntimeError, match="32 features"):
                model[1](x[:, :16])
            y = model[1](model[0](x))
            y.square().mean().backward()
            outputs.append(y.detach())
            with torch.no_grad():
                for layer in model[:2]:
                    layer.weight.sub_(layer.weight.grad, alpha=0.1)
                    layer.weight.grad = None
        results.append((torch.stack(outputs), rows.data.clone()))
    for name, plain, own in zip(("outputs", "counters"), *results, strict=True):
        if not torch.equal(plain, own):
            found.append(f"{name}: {own} for {plain}")
    return found


def test_parts_of_a_model() -> None:
    for found in run_ranks(job_parts, 2):
        assert found == []


def job_tied(rank: int, size: int) -> list[Any]:
    """A layer that is called twice, in one group."""
    torch.manual_seed(0)
    first = nn.Linear(32, 32)
    model: Any = nn.Sequential(first, nn.ReLU(), first)
    convert(model, CurrentScaling())
    rows = StatisticsBuffer()
    observe(model, rows)
    fully_shard(model)
    taken = gather_weights_in_fp8(model)
    torch.autograd.backward(model(batch(rank, 0)).sum())
    numel = dict(zip((info.name for info in rows.catalogue), rows.data[:, 0].tolist(), strict=True))
    return [taken, [path for path, _ in fp8_layers(model)], numel["0.weight"]]


def test_tied_layers() -> None:
    for taken, layers, numel in run_ranks(job_tied, 2):
        assert list(taken) == layers == ["0"]
        assert numel == 2 * 32 * 32
