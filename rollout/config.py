"""Validated options of engine, coordinator and HTTP server. A default is written once, here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, Self

from rollout.errors import ConfigError
from rollout.state import (
    KVCacheManagementMode,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
    StalenessPolicy,
)


class _Options:
    """What both tables of options can do."""

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be {rule}")

    def _check_all(self, names: tuple[str, ...], holds: Callable[[Any], bool], rule: str) -> None:
        for name in names:
            self._check(name, holds(getattr(self, name)), rule)

    def _choose(self, name: str, kind: type[Enum]) -> None:
        try:
            object.__setattr__(self, name, kind(getattr(self, name)))
        except ValueError as exc:
            choices = ", ".join(repr(member.value) for member in kind)
            raise ConfigError(
                f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be one of {choices}"
            ) from exc

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every option, in order."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(_Options):
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

    weight_fingerprints: Literal["sampled", "full", "off"] = "sampled"
    """Proof, when generating begins, that no weight has changed without an optimizer step: `sampled` compares a few
    elements of every tensor, `full` all of them, `off` none."""

    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """`bfloat16` or `float16`: rollouts run under autocast to it, as the trainer's forward does. None: under whatever
    autocast is on around the call, or is part of the model's forward (accelerate)."""

    inference_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Sample with a copy of the weights in this dtype (`float32`, `bfloat16`, `float16`), made anew after each update.
    None, and no `inference_device`: with the trainer's own weights."""

    inference_device: str | None = None
    """Sample with a copy of the weights on this device, such as `cuda:1`. None: on the trainer's."""

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
        for name, choices in _CHOICES.items():
            self._check(name, getattr(self, name) in choices, f"one of {', '.join(map(repr, choices))}")
        device = self.inference_device
        self._check(
            "inference_device", device is None or (isinstance(device, str) and bool(device)), "None or a device"
        )
        for name, kind in _ENUM_FIELDS.items():
            self._choose(name, kind)
        self._check(
            "max_tokens_per_step",
            self.max_tokens_per_step >= self.max_requests,
            f"at least max_requests={self.max_requests}, so that every active sequence can decode in one step",
        )


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(_Options):
    """Options of the coordinator. An unknown name is a `TypeError`, a value out of range a `ConfigError`."""

    data_parallel_size: int = 1
    """Ranks of the job. Barriers and deterministic routing wait for so many; fewer or more may be there otherwise."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs keys, or `insecure`."""

    inference_coordinator_port: int | None = None
    """Port to listen on. None: a free one."""

    insecure: bool = False
    """Listen off loopback without keys: whoever reaches the port can submit, read and stop everything."""

    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
    """How a rank is chosen."""

    prefix_caching_routing_alpha: float = 0.5
    """Weight of the matched prefix against free slots in the score of a rank."""

    enable_prefix_caching: bool = True
    """Look at prefixes at all; False: `load_balanced` whatever the policy."""

    block_size_tokens: int = 16
    """Tokens of one block hash; every rank must have the same."""

    deterministic_mode: bool = False
    """Route by order of arrival and sorted rank names alone, never by timing; priority does not change where, and a text
    that is being tokenised holds its place."""

    max_hashes_per_rank: int = 1 << 18
    """Block hashes remembered of one rank, the least recently used go first."""

    schedule_output_path: str | None = None
    """Write every routing decision to this JSON file, as it is taken. None: nowhere."""

    schedule_append: bool = False
    """Go on behind the records that are in that file, as a coordinator does that follows one that has died; False: make it
    anew."""

    seed: int = 0
    """Seeds the requests that bring no seed of their own, in order of arrival."""

    tokenizer: str | None = None
    """Path of a `tokenizer.json`, or its content, for prompts that come as text and engines without a tokenizer. Tokenizers
    that have no such file are not for the coordinator: whoever uses one sends token ids."""

    heartbeat_interval_s: float = 1.0
    """Whoever has been silent for so many seconds says that it lives."""

    heartbeat_timeout_s: float = 30.0
    """Silence after which the other side counts as dead."""

    progress_interval: int = 16
    """Tokens of a sample after which a rank reports them: what is computed again when it dies."""

    no_rank_timeout_s: float = 600.0
    """Requests that wait fail by name when there has been no rank that is ready for so long."""

    max_rank_losses: int = 5
    """Ranks that may die under one request, without a new token of it in between, before it is given to no other: it may
    be what kills them."""

    max_open_requests: int = 100_000
    """Groups one client may have open."""

    max_open_mb: int = 1024
    """What the open groups of one client may hold, in MiB: prompts, parameters, known tokens, very large groups."""

    max_total_open_mb: int = 4096
    """The same of all clients together."""

    max_backlog_mb: int = 256
    """Unsent bytes after which a peer that does not read counts as dead."""

    idle_exit_s: float = 60.0
    """The process ends when it has been without any rank or client for so long after the last one left."""

    outlive_launcher: bool = True
    """Go on without the process that started it, as long as some rank or client is there."""

    def __post_init__(self) -> None:
        self._check_all(
            (
                "data_parallel_size", "block_size_tokens", "max_hashes_per_rank", "progress_interval", "max_rank_losses",
                "max_open_requests", "max_open_mb", "max_total_open_mb", "max_backlog_mb",
            ),
            lambda value: _is_int(value) and value >= 1,
            "an integer of at least 1",
        )  # fmt: skip
        self._check_all(
            ("heartbeat_interval_s", "heartbeat_timeout_s", "no_rank_timeout_s", "idle_exit_s"),
            lambda value: _is_number(value) and 0 < value < float("inf"),
            "a finite number above 0",
        )
        self._check_all(
            ("insecure", "enable_prefix_caching", "deterministic_mode", "outlive_launcher", "schedule_append"),
            lambda value: isinstance(value, bool),
            "True or False",
        )
        self._check("host", isinstance(self.host, str) and bool(self.host), "an address")
        port = self.inference_coordinator_port
        self._check(
            "inference_coordinator_port", port is None or (_is_int(port) and 0 < port < 65536), "None or in [1, 65535]"
        )
        for name in ("schedule_output_path", "tokenizer"):
            self._check(name, isinstance(getattr(self, name), str | None), "None or a string")
        alpha = self.prefix_caching_routing_alpha
        self._check("prefix_caching_routing_alpha", _is_number(alpha) and 0 <= alpha <= 1, "a number in [0, 1]")
        self._check("seed", _is_int(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")
        self._check(
            "heartbeat_timeout_s",
            self.heartbeat_timeout_s >= 2 * self.heartbeat_interval_s,
            f"at least twice heartbeat_interval_s={self.heartbeat_interval_s}",
        )
        self._choose("prefix_caching_coordinator_policy", PrefixCachingCoordinatorPolicy)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(_Options):
    """Options of the HTTP server. An unknown name is a `TypeError`, a value out of range a `ConfigError`."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `api_key`, or `insecure`."""

    port: int = 8000
    """Port to listen on. 0: a free one."""

    api_key: str | None = field(default=None, repr=False)
    """What callers send as `Authorization: Bearer KEY`; everything but /health asks for it. None: nobody is asked."""

    served_model_name: str | None = None
    """The model's name in requests and replies. None: the name or path it was loaded from."""

    admin: bool = False
    """Offer pause, suspend, weights updated, abort … under /admin. Needs `api_key`, or `insecure`."""

    insecure: bool = False
    """Listen off loopback, or offer /admin, without a key: whoever reaches the port can do what it offers."""

    max_body_mb: float = 32
    """Largest body of a request, in MiB."""

    max_open_requests: int = 4096
    """Samples (prompts times n) that may be open at once over HTTP; beyond that, 429."""

    request_timeout_s: float = 600.0
    """Longest a request may take, and what `timeout_s` of a request may ask for at most."""

    stream_interval: int = 1
    """Tokens of a sample per chunk of a stream."""

    chat_template: str | None = None
    """A Jinja chat template, or the path of a file that holds one. None: the tokenizer's own."""

    shutdown_grace_s: float = 5.0
    """How long running requests may go on when the server stops; then they are aborted."""

    def __post_init__(self) -> None:
        self._check("host", isinstance(self.host, str) and bool(self.host), "an address")
        self._check("port", _is_int(self.port) and 0 <= self.port < 65536, "an integer in [0, 65535]")
        self._check_all(("admin", "insecure"), lambda value: isinstance(value, bool), "True or False")
        self._check_all(
            ("served_model_name", "chat_template"),
            lambda value: value is None or (isinstance(value, str) and bool(value)),
            "None or a string that is not empty",
        )
        self._check_all(
            ("max_open_requests", "stream_interval"),
            lambda value: _is_int(value) and value >= 1,
            "an integer of at least 1",
        )
        self._check_all(
            ("max_body_mb", "request_timeout_s"),
            lambda value: _is_number(value) and 0 < value < float("inf"),
            "a finite number above 0",
        )
        grace = self.shutdown_grace_s
        self._check(
            "shutdown_grace_s", _is_number(grace) and 0 <= grace < float("inf"), "a finite number of at least 0"
        )
        self._check_secrets()

    def _check_secrets(self) -> None:
        """The message never shows the key."""
        key = self.api_key
        if key is not None and not (isinstance(key, str) and _CREDENTIALS.fullmatch(key)):
            raise ConfigError("ServerConfig.api_key: must be None or visible ASCII characters without spaces")
        if key is not None or self.insecure:
            return
        cure = "give an api_key, or insecure=True to let whoever reaches the port in"
        if not _is_loopback(self.host):
            raise ConfigError(f"ServerConfig.host={self.host!r}: off loopback an api_key is needed; {cure}")
        if self.admin:
            raise ConfigError(f"ServerConfig.admin=True: /admin needs an api_key; {cure}")


_CREDENTIALS = re.compile(r"[!-~]+")

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "weight_fingerprints": ("sampled", "full", "off"),
    "autocast_dtype": (None, "bfloat16", "float16"),
    "inference_dtype": (None, "float32", "bfloat16", "float16"),
}

_ENUM_FIELDS: dict[str, type[Enum]] = {
    "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy,
    "kv_cache_management_mode": KVCacheManagementMode,
    "staleness_policy": StalenessPolicy,
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
