"""Random numbers for stochastic rounding, in streams of their own.

They come from Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), a
function of a key and a counter. Nothing is shared with torch's generators, so that rounding at random does
not change what a script draws, and every backend computes the same words:

* the key is the stream's seed, 64 bits, lower half first;
* the counter is (j, j >> 32, call, rank): `call` numbers the calls of the stream modulo 2^32;
* elements are numbered in row-major order. Of element i, j = 64 * (i // 256) + i % 64, and its word is the
  one of index (i // 64) % 4 of the four that the counter has.

The upper 24 bits of the word decide; see `reference.round_stochastically`.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
COUNTERS = 64
"""Counters of a group. Their first words come first, then the second ones: vectors need no shuffles."""
GROUP = 4 * COUNTERS
WORD = 0xFFFFFFFF
CHANCE_BITS = 24

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Draw(NamedTuple):
    """The random words of one call.

    `state`: int64 [2], the seed and the number of the call, on the device. `rank`: of this process. `groups`:
    contiguous int64 [2, n] for several streams at once: for each GROUP elements their number in their stream,
    and its rank. The tensor must have GROUP elements for each. `offset` is added to every word, modulo 2^32.
    """

    state: Tensor
    rank: int
    groups: Tensor | None = None
    offset: int = 0

    def words(self, size: int) -> Tensor:
        """One word for each element: int64 [size], from 0 to 2^32 - 1, on the state's device."""
        groups = -(-size // GROUP)
        counter = torch.arange(groups * COUNTERS, device=self.state.device)
        seed, call = self.state[0], self.state[1]
        zero = torch.zeros_like(counter)
        rank = zero + self.rank
        if self.groups is not None:
            numbers, rank = self.groups.repeat_interleave(COUNTERS, dim=1)
            counter = numbers * COUNTERS + counter % COUNTERS
        drawn = philox(
            (counter & WORD, counter >> 32, zero + (call & WORD), rank),
            (seed & WORD, (seed >> 32) & WORD),
        )
        words = torch.stack(drawn).view(4, groups, COUNTERS).transpose(0, 1).reshape(-1)[:size]
        return (words + self.offset) & WORD if self.offset else words

    def chances(self, like: Tensor) -> Tensor:
        """Uniform multiples of 2^-24 in [0, 1), one for each element of `like`: float32, its shape."""
        bits = self.words(like.numel()) >> (32 - CHANCE_BITS)
        return bits.float().mul_(2.0**-CHANCE_BITS).view(like.shape).to(like.device)


class RandomStream(nn.Module):
    """A stream of random words for stochastic rounding, of which every call takes the next.

    Its state is in the state_dict, so that a resumed training draws what it would have drawn. Ranks of
    torch.distributed draw different words from the same state. A checkpoint without it leaves the stream as
    it is. The stream repeats itself after 2^32 calls.

    `seed`: 64 bits; by default a function of the states of torch's generators, which are not advanced. So
    `torch.manual_seed` decides it too, and layers whose weights were drawn one after the other differ.
    Streams that are made at one state are equal; `seed_rounding` makes them differ.
    """

    state: Tensor
    """int64 [2]: the seed, and the number of calls so far."""

    def __init__(self, seed: int | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._is_own = seed is None
        self._seed = _signed(_own_seed(device) if seed is None else seed)
        with torch.inference_mode(False):
            self.register_buffer("state", torch.tensor([self._seed, 0], dtype=torch.int64, device=device))
        # The buffer is, or was, on the meta device, and nothing has been written to it since.
        self._is_empty = self.state.is_meta

    def reseed(self, seed: int) -> None:
        """Begin the stream of another seed."""
        self._is_own, self._seed = False, _signed(seed)
        self._begin()

    def restart(self) -> None:
        """Begin again, as a layer whose weights are drawn again: with a new seed, unless it was given."""
        if self._is_own:
            self._seed = _signed(_own_seed(self.state.device))
        self._begin()

    def draw(self, *, advance: bool = True) -> Draw:
        """The words of the next call; with `advance` False (a recomputation), the stream stays there."""
        drawn = Draw(self.state.clone(), _rank())
        if advance:
            self.state[1].add_(1)
        return drawn

    def materialize(self, device: torch.device) -> None:
        """Give a stream from the meta device its beginning on the device of its tensor."""
        if self._is_empty and device.type != "meta":
            with torch.inference_mode(False):
                self.state = torch.empty_like(self.state, device=device)
            self._begin()

    def _begin(self) -> None:
        self._is_empty = self.state.is_meta
        if not self._is_empty:
            with torch.no_grad():
                self.state.copy_(torch.tensor([self._seed, 0], dtype=torch.int64, device="cpu"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RandomStream":
        """Move with the model. `to_empty` leaves memory as it was."""
        before = self.state
        with torch.inference_mode(False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before.is_meta or self._is_empty:
            self._begin()
        elif not (self.state is before or self.state.is_meta):
            self.state.copy_(before)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints from before there was a stream are complete.
        if f"{prefix}state" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args)
            # Loading copies nothing to the meta device, unless it assigns.
            self._is_empty = self.state.is_meta


def seed_rounding(model: nn.Module, seed: int | None = None, *, path: str = "") -> None:
    """Begin the streams of all FP8 layers of `model` again, each with a seed of its path in the model.

    `seed`: by default torch's initial seed. Two models that are made alike round alike. `convert` does this
    for the layers that it converts. `path`: that of `model` itself in a larger one.
    """
    for name, module in model.named_modules(prefix=path):
        if isinstance(module, RandomStream):
            module.reseed(derived_seed(name, seed))


def _own_seed(device: torch.device | str | None) -> int:
    """The seed of a stream that is made by itself: a function of the states of torch's generators."""
    states = [torch.default_generator.get_state()]
    # Weights on a device were drawn from its generator, while that of the CPU stood still.
    kind = torch.device(device or "cpu").type
    if kind not in ("cpu", "meta"):
        states.append(torch.get_device_module(kind).get_rng_state(device))
    return derived_seed(str([state.tolist() for state in states]))


def derived_seed(name: str, seed: int | None = None) -> int:
    """The seed of a stream with this name: 64 bits of SHA-256 of `seed` (torch's initial seed) and name."""
    seed = torch.initial_seed() if seed is None else seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def stream_of(layer: nn.Module) -> RandomStream:
    """A layer's stream, under `scaling.rounding`."""
    scaling = layer.get_submodule("scaling")
    # Layers that an older version has pickled have none.
    if "rounding" not in scaling._modules:
        scaling.add_module("rounding", RandomStream(device=next(scaling.buffers()).device))
    stream = scaling.get_submodule("rounding")
    assert isinstance(stream, RandomStream)
    return stream


def ignore_stream(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """A hook of loading: a recipe that rounds to nearest ignores the stream in a checkpoint."""
    if "rounding" not in module._modules:
        state_dict.pop(f"{prefix}rounding.state", None)


def philox(counter: Words, key: tuple[Tensor, Tensor] | tuple[int, int]) -> Words:
    """Philox4x32-10 of counters, int64 tensors of words, and one key: the four words of each counter."""
    a, b, c, d = counter
    left_key, right_key = key
    for _ in range(ROUNDS):
        # Products of two words wrap around in int64, which changes none of their 64 bits.
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = ((right >> 32) & WORD) ^ b ^ left_key, right & WORD
        c, d = ((left >> 32) & WORD) ^ d ^ right_key, left & WORD
        left_key, right_key = (left_key + KEY_STEPS[0]) & WORD, (right_key + KEY_STEPS[1]) & WORD
    return a, b, c, d


def _rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


def _signed(seed: int) -> int:
    """The 64 bits of `seed` as an int64."""
    bits = seed & 0xFFFFFFFFFFFFFFFF
    return bits - (1 << 64) if bits >> 63 else bits
