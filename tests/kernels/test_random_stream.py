"""Random words of a stream of its own: Philox's published values, and layers that draw from nothing else."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8scope_kernels import (
    DATA_FORMATS,
    E4M3,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    RandomStream,
    Recipe,
    convert,
    plain_state_dict,
    quantize,
    quantize_blocks,
    quantize_values,
    random_stream,
    reference,
    round_stochastically,
    seed_rounding,
)
from fp8scope_kernels.random_stream import Draw, philox

# Known answers of the authors' own library, Random123 (file kat_vectors): counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
ROUNDING = (CurrentScaling(stochastic_gradients=True), DelayedScaling(stochastic_gradients=True))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_it_works(counter: str, key: str, expected: str) -> None:
    a, b, c, d = (torch.tensor([int(word, 16)]) for word in counter.split())
    left, right = (int(word, 16) for word in key.split())
    assert [f"{word.item():08x}" for word in philox((a, b, c, d), (left, right))] == expected.split()


def one_word(seed: int, call: int, rank: int, element: int) -> int:
    """The definition for a single element, in Python's integers."""
    index = 64 * (element // 256) + element % 64
    a, b, c, d = index & 0xFFFFFFFF, index >> 32, call & 0xFFFFFFFF, rank
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (right >> 32) ^ b ^ keys[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ d ^ keys[1],
            left & 0xFFFFFFFF,
        )
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (a, b, c, d)[(element // 64) % 4]


@pytest.mark.parametrize(("seed", "call", "rank"), [(3, 0, 0), (2**64 - 5, 2**33 + 7, 63)])
def test_each_element_has_its_word(seed: int, call: int, rank: int) -> None:
    stream = RandomStream(seed)
    stream.state[1] = call
    words = Draw(stream.state, rank).words(1000)
    assert words.tolist() == [one_word(seed, call, rank, element) for element in range(1000)]


@pytest.mark.usefixtures("width")
def test_streams_take_turns_in_one_call() -> None:
    """Each 256 elements have words of their own stream, in eager torch and with all vectors."""
    state, turns = torch.tensor([3, 5]), [(0, 7), (2, 0), (1, 7), (2**30, 1)]
    draw = Draw(state, 0, torch.tensor(turns).T.contiguous(), offset=2**31 + 12345)
    elements = [(number, rank, i) for number, rank in turns for i in (0, 63, 64, 255)]
    words = draw.words(1024).view(4, 256)[:, [0, 63, 64, 255]].flatten()
    expected_words = [one_word(3, 5, rank, 256 * number + i) + 2**31 + 12345 for number, rank, i in elements]
    assert words.tolist() == [word % 2**32 for word in expected_words]
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "stochastic": draw}
    scaling = BlockScaling(power_of_two=False)
    compiled = quantize_blocks(x, E4M3, (1, 256), scaling, **settings)
    expected = reference.quantize_blocks(x, E4M3, (1, 256), scaling, None, None, **settings)
    assert torch.equal(compiled.values.view(torch.uint8), expected.values.view(torch.uint8))


def test_every_call_takes_the_next_words() -> None:
    stream, same = RandomStream(7), RandomStream(7)
    x, one = torch.full((3000,), 1.1), torch.tensor(1.0)
    first, second = (quantize_values(x, one, E4M3, stochastic=stream) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(quantize_values(x, one, E4M3, stochastic=same), first)
    waiting = same.draw(advance=False)
    assert torch.equal(quantize_values(x, one, E4M3, stochastic=waiting), second)
    assert torch.equal(quantize_values(x, one, E4M3, stochastic=same), second)
    assert same.state.tolist() == [7, 2]


@pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
def test_it_is_unbiased(fmt: Any) -> None:
    """A quarter of a step above each value, 16,384 times, is a binomial count within 5 sigma."""
    values = torch.unique(fmt.table[fmt.table.isfinite()])
    low, high = values[:-1], values[1:]
    trials, share = 2**14, 0.25
    x = low + share * (high - low)
    rounded = round_stochastically(x.repeat(trials, 1), fmt, RandomStream(5))
    assert ((rounded == low) | (rounded == high)).all()
    ups = (rounded == high).double().sum(0)
    assert ((ups - share * trials).abs() <= 5 * (trials * share * (1 - share)) ** 0.5).all()


def test_words_are_uniform_and_independent_of_each_other() -> None:
    """Chi-squared of the upper bytes, and the correlation of neighbouring elements, calls and ranks."""
    size = 2**18
    stream = RandomStream(11)
    words = [
        Draw(torch.tensor([stream.state[0], call]), rank).words(size).double().numpy()
        for call, rank in ((0, 0), (1, 0), (0, 1))
    ]
    counts = np.bincount((words[0] // 2**24).astype(int), minlength=256)
    chi = ((counts - size / 256) ** 2 / (size / 256)).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert abs(chi - 255) < 5 * 22.6
    for one, other in ((words[0][1:], words[0][:-1]), (words[0], words[1]), (words[0], words[2])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / size**0.5


@contextmanager
def at_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(random_stream, "_rank", lambda: rank)
        yield


def test_ranks_draw_different_words_from_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    x, one = torch.full((100,), 1.1), torch.tensor(1.0)
    results = []
    for rank in (0, 1, 0):
        with at_rank(monkeypatch, rank):
            results.append(quantize(x, one, E4M3, stochastic=RandomStream(1)).data.float())
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def stream_of(layer: nn.Module) -> RandomStream:
    assert isinstance(layer, Fp8Linear)
    stream = layer.scaling["rounding"]
    assert isinstance(stream, RandomStream)
    return stream


def model_of(recipe: Recipe, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))
    convert(model, recipe)
    return model


def steps(model: nn.Module, number: int, first: int = 0) -> list[Tensor]:
    """The gradients of all parameters in some steps of plain SGD."""
    grads = []
    for step in range(first, first + number):
        torch.manual_seed(100 + step)
        model(torch.randn(48, 32)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            grads.append(parameter.grad.clone())
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return grads


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", ROUNDING, ids=lambda recipe: recipe.kind)
def test_layers_leave_torchs_generator_alone(recipe: Recipe) -> None:
    model_of(recipe)
    made = torch.get_rng_state()
    model_of(type(recipe)())
    assert torch.equal(made, torch.get_rng_state())
    after = []
    for own in (recipe, type(recipe)()):
        steps(model_of(own), 1)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


@pytest.mark.parametrize("recipe", ROUNDING, ids=lambda recipe: recipe.kind)
def test_a_run_is_reproducible_and_resumes_bit_for_bit(recipe: Recipe) -> None:
    whole = steps(model_of(recipe), 4)
    assert equal(steps(model_of(recipe), 4), whole)
    begun = model_of(recipe)
    half = steps(begun, 2)
    resumed = model_of(recipe, seed=2)
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    assert equal(half + steps(resumed, 2, first=2), whole)
    copied = pickle.loads(pickle.dumps(begun))
    assert equal(steps(copied, 2, first=2), steps(begun, 2, first=2))
    other = model_of(recipe)
    seed_rounding(other, 5)
    assert not equal(steps(other, 4), whole)


def test_checkpoints_with_and_without_a_stream() -> None:
    rounding, plain = model_of(ROUNDING[0]), model_of(CurrentScaling())
    state = rounding.state_dict()
    assert [key for key in state if "rounding" in key] == [
        "0.scaling.rounding.state",
        "2.scaling.rounding.state",
    ]
    plain.load_state_dict(state)
    before = stream_of(rounding[0]).state.clone()
    rounding.load_state_dict(plain.state_dict())
    assert torch.equal(stream_of(rounding[0]).state, before)
    assert (
        list(plain_state_dict(state))
        == list(plain_state_dict(plain))
        == ["0.weight", "0.bias", "2.weight", "2.bias"]
    )


def test_layers_of_one_model_and_of_one_process_differ() -> None:
    model = model_of(ROUNDING[0])
    layers = [Fp8Linear(32, 32, recipe=ROUNDING[0]) for _ in range(2)]
    streams = [stream_of(layer).state for layer in (model[0], model[2], *layers)]
    assert len({int(stream[0]) for stream in streams}) == 4


def test_layers_of_their_own_are_reproducible() -> None:
    seeds = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        layers = [Fp8Linear(32, 32, recipe=ROUNDING[0]) for _ in range(2)]
        seeds.append([int(stream_of(layer).state[0]) for layer in layers])
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2])


def test_evaluation_does_not_advance_the_stream() -> None:
    model = model_of(ROUNDING[0]).eval()
    for _ in range(2):
        x = torch.ones(16, 32, requires_grad=True)
        model(x).sum().backward()
    assert stream_of(model[0]).state[1] == 0


def test_a_stream_from_the_meta_device_begins_when_it_has_memory() -> None:
    with torch.device("meta"):
        layer = Fp8Linear(32, 32, recipe=ROUNDING[0])
    stream = stream_of(layer)
    assert stream.state.is_meta
    seed = stream._seed
    layer.to_empty(device="cpu")
    assert stream.state.tolist() == [seed, 0]
    stream.state[1] = 4
    layer.to_empty(device="cpu").to(torch.bfloat16)
    assert stream.state.tolist() == [seed, 4]


def test_a_layer_from_an_older_pickle_gets_a_stream() -> None:
    layer = Fp8Linear(32, 32, recipe=ROUNDING[0])
    del layer.scaling["rounding"]
    layer(torch.ones(16, 32)).sum().backward()
    assert stream_of(layer).state[1] == 1
