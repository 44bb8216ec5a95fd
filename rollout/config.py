"""What a user may configure, checked when it is built. A default is written once, here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from rollout.errors import ConfigError
from rollout.state import KVCacheManagementMode, PrefixCachingEvictionPolicy, StalenessPolicy


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Options of one engine. An unknown name is a `TypeError`, a value out of range a `ConfigError`."""

    block_size_tokens: int = 16
    """Token slots of one KV block."""

    kv_cache_blocks: int | None = None
    """Blocks in the KV pool. None: as many as `kv_cache_memory_gb` holds."""

    kv_cache_memory_gb: float | None = None
    """Size of the KV pool in GiB, used when `kv_cache_blocks` is None. None: `kv_cache_memory_fraction` decides."""

    kv_cache_memory_fraction: float = 0.5
    """Share of the device memory free at construction that the pool may take (host memory on a CPU), never more
    blocks than `max_requests` sequences of the maximum length can use."""

    max_sequence_length: int | None = None
    """Longest prompt + completion in tokens. None: the model's `max_position_embeddings`."""

    max_requests: int = 256
    """Sequences that may be active at once."""

    max_tokens_per_step: int = 2048
    """Token budget of one forward: decodes first, prefill chunks in what is left."""

    enable_prefix_caching: bool = True
    """Share complete KV blocks between requests with equal prefixes under one policy version."""

    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU
    """`lru` keeps unreferenced blocks until room is needed; `ref_zero` forgets them with their last reference."""

    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.OFFLOAD
    """What `suspend` does with the KV cache unless the call says otherwise."""

    max_staleness: int | None = None
    """Most weight updates between the sampling of a token and its use. None: unbounded."""

    staleness_policy: StalenessPolicy = StalenessPolicy.PARTIAL
    """What becomes of a request that would exceed `max_staleness`."""

    seed: int = 0
    """Seeds the requests that bring no seed of their own."""

    track_generated_token_events: bool = False
    """Record one GENERATED_TOKEN event per token (costs Python time per token)."""

    fused_forward: bool = True
    """On a CPU, run a Llama-like decoder through one C++ forward over the module's own parameters; False: its own."""

    cuda_graphs: bool = True
    """On CUDA, replay decode steps as captured graphs; False: run the module's forward every step."""

    verify_model: bool = True
    """At construction, compare a few tokens through the paged path with the model's own forward."""

    control_timeout_s: float = 600.0
    """Deadline of a control call, in seconds."""

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "max_requests", "max_tokens_per_step"):
            self._check(name, _is_int(getattr(self, name)) and getattr(self, name) >= 1, "an integer of at least 1")
        for name in ("kv_cache_blocks", "max_sequence_length"):
            value = getattr(self, name)
            self._check(name, value is None or (_is_int(value) and value >= 1), "None or an integer of at least 1")
        self._check(
            "kv_cache_memory_gb",
            self.kv_cache_memory_gb is None or (_is_number(self.kv_cache_memory_gb) and self.kv_cache_memory_gb > 0),
            "None or a number above 0",
        )
        self._check(
            "kv_cache_memory_fraction",
            _is_number(self.kv_cache_memory_fraction) and 0 < self.kv_cache_memory_fraction <= 1,
            "a number in (0, 1]",
        )
        self._check(
            "control_timeout_s", _is_number(self.control_timeout_s) and self.control_timeout_s > 0, "a number above 0"
        )
        self._check(
            "max_staleness",
            self.max_staleness is None or (_is_int(self.max_staleness) and self.max_staleness >= 0),
            "None or an integer of at least 0",
        )
        self._check("seed", _is_int(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")
        for name in (
            "enable_prefix_caching", "track_generated_token_events", "fused_forward", "cuda_graphs", "verify_model",
        ):  # fmt: skip
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name, kind in _ENUM_FIELDS.items():
            object.__setattr__(self, name, self._member(name, kind))
        self._check(
            "max_tokens_per_step",
            self.max_tokens_per_step >= self.max_requests,
            f"at least max_requests={self.max_requests}, so that every active sequence can decode in one step",
        )

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(f"InferenceConfig.{name}={getattr(self, name)!r}: must be {rule}")

    def _member(self, name: str, kind: type[Enum]) -> Enum:
        try:
            return kind(getattr(self, name))
        except ValueError as exc:
            choices = ", ".join(repr(member.value) for member in kind)
            raise ConfigError(f"InferenceConfig.{name}={getattr(self, name)!r}: must be one of {choices}") from exc

    def replace(self, **changes: Any) -> InferenceConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every option, in order."""
        return tuple(field.name for field in fields(cls))


_ENUM_FIELDS: dict[str, type[Enum]] = {
    "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy,
    "kv_cache_management_mode": KVCacheManagementMode,
    "staleness_policy": StalenessPolicy,
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
