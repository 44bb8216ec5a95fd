"""Configuration dataclasses of the engine, the coordinator and the HTTP server.

Each class is frozen, takes only keyword arguments, and validates every field at construction. An unknown name or a value
out of range raises `ConfigError`. Defaults are defined here and nowhere else. Command-line flags and the reference
documentation are generated from these fields.
"""

from __future__ import annotations

import ast
import inspect
import ipaddress
import math
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from textwrap import dedent
from typing import ClassVar, Literal

from rollout.errors import (
    ABOVE_0,
    ADDRESS,
    AT_LEAST_1,
    FINITE,
    SEED,
    ConfigError,
    Options,
    Rules,
    is_int,
    is_number,
    is_text,
    one_of,
    or_none,
)
from rollout.state import (
    KVCacheManagementMode,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
    StalenessPolicy,
)

try:
    __version__ = version("rollout-engine")
except PackageNotFoundError:
    # The package is not installed; its source folder is on `sys.path`.
    __version__ = "0+unknown"


@dataclass(frozen=True, kw_only=True)
class Advanced(Options):
    """Rarely needed options of one engine: `InferenceConfig(advanced=Advanced(...))`. Frozen; validated at construction."""

    block_size_tokens: int = 16
    """Number of tokens per KV block. At least 1."""

    state_slots: int | None = None
    """Number of recurrent states in memory, at least 1, for models with recurrent layers (linear attention, state spaces,
    short convolutions). Every running sequence needs one, which limits how many run; the others cache states for prefix
    hits. If None, twice `max_requests`, in at most half of the KV pool's memory."""

    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU
    """With `lru`, unreferenced blocks stay cached until their memory is needed. With `ref_zero`, a block is evicted when
    its last reference is released."""

    image_cache_memory_gb: float = 0.25
    """Size in GiB of the cache of vision tower outputs, for images that occur again. Above 0. `suspend` releases it."""

    track_generated_token_events: bool = False
    """Record a GENERATED_TOKEN event for every token. This costs Python time for every token."""

    fused_forward: bool = True
    """On a CPU, run decoders of known families, with or without LoRA, through a fused C++ forward pass that reads the
    module's parameters in place. If False, run the module's own forward pass, as on CUDA."""

    cuda_graphs: bool = True
    """On CUDA, capture decode steps as CUDA graphs and replay them. If False, all steps run the module's forward pass."""

    virtual_memory: bool = True
    """On CUDA, map the KV pool with the driver's virtual memory calls: `suspend` returns all of its memory to the driver,
    and `resume` maps it at the same addresses. If False, or if the driver lacks these calls, use torch's allocator and
    empty its cache at `suspend`."""

    verify_model: bool = True
    """At construction, check that the engine's logits of a few tokens equal those of the model's own forward pass."""

    weight_fingerprints: Literal["sampled", "off"] = "sampled"
    """Check before generating that no weight changed without an optimizer step. `sampled` compares a few elements of every
    tensor; `off` checks nothing."""

    control_timeout_s: float = 600.0
    """Deadline of a control call such as pause, suspend or resume, in seconds. Above 0."""

    _rules: ClassVar[Rules] = {
        AT_LEAST_1: ("block_size_tokens",),
        or_none(AT_LEAST_1): ("state_slots",),
        FINITE: ("image_cache_memory_gb",),
        ABOVE_0: ("control_timeout_s",),
        one_of("sampled", "off"): ("weight_fingerprints",),
    }


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Options):
    """Options of one engine. Frozen; validated at construction."""

    kv_cache_blocks: int | None = None
    """Number of blocks in the KV pool, at least 1. If None, as many as fit into `kv_cache_memory_gb`."""

    kv_cache_memory_gb: float | None = None
    """Size of the KV pool in GiB, above 0. Used only without `kv_cache_blocks`. If None, computed from
    `kv_cache_memory_fraction`."""

    kv_cache_memory_fraction: float = 0.5
    """Share of the memory free at construction that the KV pool may take, in (0, 1]: device memory, or host memory on a
    CPU. The pool has at most the blocks that `max_requests` sequences of `max_sequence_length` tokens can use. On a GPU, you
    can set more, such as 0.85, if the pool is suspended during the optimizer step. The engine leaves free what its own
    steps need, and `resume` shrinks the pool to what the trainer leaves free."""

    max_sequence_length: int | None = None
    """Maximum length of prompt + completion, in tokens. If None, the model's `max_position_embeddings`."""

    max_requests: int = 256
    """Maximum number of active (running) sequences. At least 1."""

    max_tokens_per_step: int | None = None
    """Token budget of one forward pass, at least `max_requests`. Decodes are scheduled first, and prefill chunks use the
    rest. If None, 8192 on CUDA and 2048 elsewhere, or `max_requests` if that is more."""

    enable_prefix_caching: bool = True
    """Share full KV blocks between requests with equal prefixes under the same policy version."""

    kv_cache_host_memory_gb: float | None = None
    """Size of the prefix cache's host tier in GiB, above 0. It stores blocks that the KV pool evicts, and loads them again
    when a prompt starts with them. Its memory is allocated at construction (pinned on CUDA), in addition to the memory that
    `suspend` uses. Not for models with recurrent layers. If None, evicted blocks are computed again."""

    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.OFFLOAD
    """Default mode of `suspend`. `persist` keeps the KV cache on the device. `offload` copies it to host memory, and
    `resume` copies it back. `recompute` drops it, and it is prefilled again after `resume`."""

    max_staleness: int | None = None
    """Maximum number of weight updates between sampling a token and training on it, at least 0. If None, unlimited."""

    staleness_policy: StalenessPolicy = StalenessPolicy.PARTIAL
    """Handling of a request that would exceed `max_staleness`. `partial` finishes it with the tokens it has. `requeue`
    starts it again from its prompt. `mask` continues it, and masks its stale tokens out of the loss."""

    seed: int = 0
    """Base seed for requests without a seed of their own, in [0, 2**63)."""

    exact: bool = False
    """Compute sampling log-probs that are bit for bit equal to the trainer's inside `with rollout.exact(model)`. Only for
    Llama, Mistral, Qwen2 and Qwen3 on a CPU."""

    record_routes: bool = False
    """Record which experts every router of a mixture-of-experts model chooses, for `RolloutBatch.routed_experts` and `with
    rollout.replay(batch, model)`. Routes are stored in the KV blocks next to K and V. Steps run without CUDA graphs."""

    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype of `torch.autocast` during rollouts: `bfloat16` or `float16`. If None, the caller's autocast state applies, or
    the autocast that the model's own `forward` sets (accelerate)."""

    inference_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Sample from a copy of the weights in this dtype (`float32`, `bfloat16` or `float16`), refreshed after each update. If
    this and `inference_device` are both None, sample from the trainer's weights, without a copy."""

    inference_device: str | None = None
    """Sample from a copy of the weights on this device, such as `cuda:1`. If None, the trainer's device."""

    advanced: Advanced = Advanced()
    """Rarely needed options, as `Advanced(...)`."""

    _rules: ClassVar[Rules] = {
        AT_LEAST_1: ("max_requests",),
        or_none(AT_LEAST_1): ("kv_cache_blocks", "max_sequence_length", "max_tokens_per_step"),
        or_none(ABOVE_0): ("kv_cache_memory_gb",),
        or_none(FINITE): ("kv_cache_host_memory_gb",),
        (lambda value: is_number(value) and 0 < value <= 1, "a number in (0, 1]"): ("kv_cache_memory_fraction",),
        or_none((lambda value: is_int(value) and value >= 0, "an integer of at least 0")): ("max_staleness",),
        SEED: ("seed",),
        one_of(None, "bfloat16", "float16"): ("autocast_dtype",),
        one_of(None, "float32", "bfloat16", "float16"): ("inference_dtype",),
        or_none((is_text, "a device")): ("inference_device",),
        (lambda value: isinstance(value, Advanced), "Advanced(...)"): ("advanced",),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("autocast_dtype", "inference_dtype", "inference_device"):
            alone = not self.exact or getattr(self, name) is None
            self._check(name, alone, "None with exact=True, which samples with the trainer's own weights and dtype")
        self._check(
            "record_routes", not (self.exact and self.record_routes), "False with exact=True, which has no routers"
        )
        advanced = self.advanced
        policy = advanced.prefix_caching_eviction_policy
        keeps = self.enable_prefix_caching and policy is not PrefixCachingEvictionPolicy.REF_ZERO
        self._check(
            "kv_cache_host_memory_gb",
            self.kv_cache_host_memory_gb is None or keeps,
            "None without enable_prefix_caching, or with prefix_caching_eviction_policy='ref_zero': nothing is kept then",
        )
        advanced._check("fused_forward", not self.exact or advanced.fused_forward, "True with exact=True")
        self._check(
            "max_tokens_per_step",
            self.step_tokens >= self.max_requests,
            f"at least max_requests={self.max_requests}, so that every active sequence can decode in one step",
        )

    @property
    def step_tokens(self) -> int:
        """The token budget of one step: `max_tokens_per_step`, or if that is None, the default of engines on a CPU."""
        return max(2048, self.max_requests) if self.max_tokens_per_step is None else self.max_tokens_per_step


@dataclass(frozen=True, kw_only=True)
class CoordinatorAdvanced(Options):
    """Options for large jobs and slow networks, passed as `CoordinatorConfig(advanced=CoordinatorAdvanced(...))`.

    Frozen; validated at construction. Import the class from `rollout.config`."""

    heartbeat_timeout_s: float = 30.0
    """Seconds without incoming traffic after which a peer is considered dead, above 0. A peer that has sent nothing for a
    thirtieth of this time sends a heartbeat."""

    progress_interval: int = 16
    """Number of new tokens of a sample after which a rank reports them, at least 1. If the rank dies, at most this many
    tokens per sample are computed again."""

    no_rank_timeout_s: float = 600.0
    """Seconds without a ready rank after which waiting requests fail with `RequestTimeoutError`. Above 0."""

    max_open_mb: int = 1024
    """Maximum memory of one client's open requests (prompts, parameters and tokens generated so far), in MiB. At least 1."""

    _rules: ClassVar[Rules] = {
        AT_LEAST_1: ("progress_interval", "max_open_mb"),
        FINITE: ("heartbeat_timeout_s", "no_rank_timeout_s"),
    }

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds without outgoing traffic after which a peer sends a heartbeat."""
        return self.heartbeat_timeout_s / 30


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(Options):
    """Options of the coordinator. Frozen; validated at construction."""

    data_parallel_size: int = 1
    """Number of ranks in the job, at least 1. Barriers and deterministic routing wait for this many ranks; other routing
    works with fewer or more."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback requires job keys (`JobKeys`), or `insecure`."""

    inference_coordinator_port: int | None = None
    """TCP port to listen on, in [1, 65535]. If None, a free port is chosen."""

    insecure: bool = False
    """Allow listening on an address other than loopback without job keys. Every process that reaches the port can then
    submit requests, read results and stop the job."""

    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
    """Policy that routes requests to ranks: `longest_prefix`, `first_prefix_block`, `load_balanced` or `round_robin`."""

    enable_prefix_caching: bool = True
    """Consider cached prefixes when routing. If False, `longest_prefix` and `first_prefix_block` become `load_balanced`."""

    block_size_tokens: int = 16
    """Number of tokens per hashed KV block, at least 1. Must equal every rank's `block_size_tokens`."""

    deterministic_mode: bool = False
    """Route only by order of arrival and sorted rank names, so that timing has no effect. A request's priority then does
    not affect the choice of the rank, and a text prompt keeps its place in the order while it is tokenised."""

    schedule_output_path: str | None = None
    """Path of a JSON file to which every routing decision is written immediately. A coordinator that replaces a dead one
    writes to `PATH.1`, the next one to `PATH.2`. If None, decisions are not written."""

    seed: int = 0
    """Base seed, in [0, 2**63). Requests without a seed of their own derive one from it and their order of arrival."""

    tokenizer: str | None = None
    """Path or content of a `tokenizer.json`, for text prompts and for engines without a tokenizer. If None, the tokenizer
    of the `LLM` or `RolloutManager` that starts the coordinator; if it depends on Python code, send token ids."""

    advanced: CoordinatorAdvanced = CoordinatorAdvanced()
    """Rarely needed timeouts and bounds, as `CoordinatorAdvanced(...)`."""

    _rules: ClassVar[Rules] = {
        AT_LEAST_1: ("data_parallel_size", "block_size_tokens"),
        ADDRESS: ("host",),
        or_none((lambda value: is_int(value) and 0 < value < 65536, "in [1, 65535]")): ("inference_coordinator_port",),
        or_none((lambda value: isinstance(value, str), "a string")): ("schedule_output_path", "tokenizer"),
        SEED: ("seed",),
        (lambda value: isinstance(value, CoordinatorAdvanced), "CoordinatorAdvanced(...)"): ("advanced",),
    }


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Options):
    """Options of the HTTP server. Frozen; validated at construction."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback requires `api_key` or `insecure`."""

    port: int = 8000
    """TCP port to listen on, in [0, 65535]. If 0, a free port is chosen."""

    api_key: str | None = field(default=None, repr=False)
    """Key that clients send as `Authorization: Bearer KEY`, in visible ASCII characters without spaces. It is required on
    every path except /health and /ping. If None, there is no authentication."""

    served_model_name: str | None = None
    """Name of the model in requests and replies. If None, the name or path that the model was loaded from."""

    admin: bool = False
    """Serve the control routes (pause, sleep, weights, abort, ...). Requires `api_key` or `insecure`."""

    insecure: bool = False
    """Allow listening on an address other than loopback, or `admin`, without a key. Every process that reaches the port can
    then use all routes."""

    max_open_requests: int = 4096
    """Maximum number of samples (prompts times n) that are open over HTTP at the same time, at least 1. Requests beyond
    this limit are rejected with status 429."""

    request_timeout_s: float = 600.0
    """Maximum duration of a request, in seconds, above 0. A request's own `timeout_s` is capped at this value."""

    chat_template: str | None = None
    """Jinja chat template, or the path of a file that contains one. If None, the tokenizer's template is used."""

    shutdown_grace_s: float = 5.0
    """Seconds that running requests have to finish when the server stops, at least 0. They are then aborted."""

    _rules: ClassVar[Rules] = {
        ADDRESS: ("host",),
        (lambda value: is_int(value) and 0 <= value < 65536, "an integer in [0, 65535]"): ("port",),
        or_none((is_text, "a string that is not empty")): ("served_model_name", "chat_template"),
        AT_LEAST_1: ("max_open_requests",),
        FINITE: ("request_timeout_s",),
        (lambda value: is_number(value) and 0 <= value < math.inf, "a finite number of at least 0"): (
            "shutdown_grace_s",
        ),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_secrets()

    def _check_secrets(self) -> None:
        """Check the key and the options that require one. Error messages never contain the key."""
        key = self.api_key
        if key is not None and not (isinstance(key, str) and _CREDENTIALS.fullmatch(key)):
            raise ConfigError("ServerConfig.api_key: must be None or visible ASCII characters without spaces")
        if key is not None or self.insecure:
            return
        cure = "give an api_key, or insecure=True to let every process that reaches the port in"
        if not _is_loopback(self.host):
            raise ConfigError(f"ServerConfig.host={self.host!r}: off loopback an api_key is needed; {cure}")
        if self.admin:
            raise ConfigError(f"ServerConfig.admin=True: the control routes need an api_key; {cure}")


_CREDENTIALS = re.compile(r"[!-~]+")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


@cache
def documentation(options: type) -> dict[str, str]:
    """Return a dict from the name of each field of a dataclass to the docstring below the field, joined to one line."""
    (definition,) = ast.parse(dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        option.target.id: " ".join(below.value.value.split())
        for option, below in pairwise(definition.body)
        if isinstance(option, ast.AnnAssign)
        and isinstance(option.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
