"""Chained hashes of a prompt's blocks, one per complete block, and seeds of random streams.

    token hash of block i    t_i = mix(Σ_j mix(token_j) · HASH_BASE^j  mod 2^64) mod HASH_PRIME
    hash of block i          h_i = (h_{i-1} · HASH_BASE + t_i) mod HASH_PRIME + 1,   h_{-1} = 0, or a hash of the salt

`mix` adds splitmix64's golden-ratio constant, then applies splitmix64's finaliser (Steele, Lea & Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). Every token is mixed first, because a plain polynomial has simple collisions:
adding k to token j and subtracting 31k from token j-1 changes nothing. The chain is linear modulo a prime, hence injective
in the parent: chains that differ stay different if equal blocks follow. A cache hit also requires equal tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import ConfigError

HASH_PRIME = 2305843009213693951
"""The Mersenne prime 2^61 - 1, the modulus of block hashes."""

HASH_BASE = 31

GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def compute_block_hashes_batched(
    prompt_tokens: Sequence[int] | NDArray[Any], block_size: int, salt: str | None = None
) -> list[int]:
    """Return the hashes of a prompt's complete blocks, each in 1 … `HASH_PRIME`.

    Args:
        prompt_tokens: token ids, as a list or as a one-dimensional numpy array or torch tensor.
        block_size: number of tokens in a block.
        salt: the value of `SamplingParams.prefix_share`. Equal prompts with different salts have different hashes.

    Raises:
        ConfigError: `block_size` is below 1, or the tokens are not integers of one dimension.
    """
    if block_size < 1:
        raise ConfigError(f"block_size={block_size!r}: must be at least 1")
    tokens = integer_array("prompt_tokens", prompt_tokens)
    count = len(tokens) // block_size
    hashes = []
    parent = chain_root(salt)
    for token_hash in _token_hashes(tokens[: count * block_size].reshape(count, block_size)).tolist():
        parent = (parent * HASH_BASE + token_hash) % HASH_PRIME + 1
        hashes.append(parent)
    return hashes


def chain_root(salt: str | None) -> int:
    """Return the hash from which a chain of block hashes starts, in 0 … `HASH_PRIME`; 0 without a salt."""
    if salt is None:
        return 0
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little") % HASH_PRIME + 1


def chain_block_hashes(parents: NDArray[np.int64], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Extend B hash chains by one block each. The hashes equal `compute_block_hashes_batched` for the longer prompts.

    Args:
        parents: int64 [B], the hash of each preceding block, or `chain_root` for a chain's first block.
        blocks: int64 [B, block_size], token ids.

    Returns:
        The hashes, int64 [B], each in 1 … `HASH_PRIME`.

    Raises:
        ConfigError: the shapes do not match, or an array does not hold integers.
    """
    before = integer_array("parents", parents)
    tokens = integer_array("blocks", blocks, dimensions=2)
    if len(before) != len(tokens):
        raise ConfigError(f"parents {before.shape} and blocks {tokens.shape}: must have as many rows")
    links = (_times_base(before.view(np.uint64)) + _token_hashes(tokens)) % np.uint64(HASH_PRIME) + np.uint64(1)
    return links.view(np.int64)


def _token_hashes(blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash the tokens of B blocks, int64 [B, block_size], to uint64 [B] below `HASH_PRIME`. Sums wrap modulo 2^64."""
    powers = np.cumprod(np.array([1] + [HASH_BASE] * (blocks.shape[1] - 1), dtype=np.uint64)[: blocks.shape[1]])
    sums: NDArray[np.uint64] = (_mix(blocks.view(np.uint64)) * powers).sum(axis=1, dtype=np.uint64)
    return _mix(sums) % np.uint64(HASH_PRIME)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(GOLDEN)
    for shift, factor in ROUNDS:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(LAST_SHIFT))


def _times_base(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers below 2^62 that are congruent to values · HASH_BASE modulo 2^61 - 1, without 64-bit overflow."""
    high = (values >> np.uint64(31)) * np.uint64(HASH_BASE)
    low = (values & np.uint64(2**31 - 1)) * np.uint64(HASH_BASE)
    product: NDArray[np.uint64] = (high >> np.uint64(30)) + ((high & np.uint64(2**30 - 1)) << np.uint64(31)) + low
    return product


def integer_array(name: str, values: Any, dimensions: int = 1) -> NDArray[np.int64]:
    """Convert nested sequences, an array or a tensor to a contiguous int64 array.

    Raises:
        ConfigError: the values are not integers, or have another number of dimensions. The message begins with `name`.
    """
    rule = f"must be integers of {dimensions} dimension(s)"
    try:
        array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except (ValueError, OverflowError) as exc:
        raise ConfigError(f"{name}: {rule}: {exc}") from exc
    if array.ndim != dimensions or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"{name} of dtype {array.dtype} and shape {array.shape}: {rule}")
    return np.ascontiguousarray(array, dtype=np.int64)


def stream_key(seed: int, index: int) -> int:
    """Return the key, in [0, 2^63), of random stream `index` under `seed`, computed by two rounds of splitmix64.

    A request without a seed gets the key whose index is the request's number. A sample gets the key of its sample index.
    """
    return _mixed(_mixed(seed + GOLDEN) + (index + 1) * GOLDEN) >> 1


def _mixed(state: int) -> int:
    state %= 2**64
    for shift, factor in ROUNDS:
        state = (state ^ state >> shift) * factor % 2**64
    return state ^ state >> LAST_SHIFT
