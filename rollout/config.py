"""Configuration dataclasses of the engine, the coordinator and the HTTP server.

Each class is frozen, takes keyword arguments only, and validates every field at construction: an unknown name and a value
out of range raise `ConfigError`. Defaults are defined here and nowhere else; command-line flags and the reference
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
    # The folders are on the path, but the package is not installed.
    __version__ = "0+unknown"


@dataclass(frozen=True, kw_only=True)
class Advanced(Options):
    """Options of one engine that are rarely set: `InferenceConfig(advanced=Advanced(...))`. Frozen; validated."""

    block_size_tokens: int = 16
    """Tokens per KV block. At least 1."""

    state_slots: int | None = None
    """Number of recurrent states kept, for models with such layers (linear attention, state spaces, short convolutions), at
    least 1: one per running sequence, which limits how many run; the rest serve prefix hits. None: two for each of
    `max_requests`, in at most half of the KV pool's memory."""

    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU
    """`lru`: unreferenced blocks stay cached until their memory is needed. `ref_zero`: a block is evicted when its last
    reference is released."""

    image_cache_memory_gb: float = 0.25
    """Memory that keeps the vision tower's outputs for later turns, in GiB, above 0; `suspend` releases it."""

    track_generated_token_events: bool = False
    """Record one GENERATED_TOKEN event per token, at a cost in Python time per token."""

    fused_forward: bool = True
    """On a CPU, run decoders of known families, LoRA included, through a fused C++ forward that reads the parameters
    of the module in place. False: run the module's own forward, as on CUDA."""

    cuda_graphs: bool = True
    """On CUDA, capture decode steps as CUDA graphs and replay them. False: run the module's forward in every step."""

    virtual_memory: bool = True
    """On CUDA, map the KV pool with the driver's virtual memory calls: a suspend returns all of it to the driver, and a
    resume maps it at the same addresses. False, or if the driver lacks them: use torch's allocator and empty its cache at a
    suspend."""

    verify_model: bool = True
    """At construction, compare a few tokens computed through the paged path with the model's own forward."""

    weight_fingerprints: Literal["sampled", "off"] = "sampled"
    """Check before generating that no weight changed without an optimizer step. `sampled`: compare a few elements of every
    tensor. `off`: no check."""

    control_timeout_s: float = 600.0
    """Deadline of a control call (pause, suspend, resume, ...), in seconds. Above 0."""

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
    """Number of blocks in the KV pool, at least 1. None: as many as fit into `kv_cache_memory_gb`."""

    kv_cache_memory_gb: float | None = None
    """Size of the KV pool in GiB, above 0. Used only when `kv_cache_blocks` is None. None: computed from
    `kv_cache_memory_fraction`."""

    kv_cache_memory_fraction: float = 0.5
    """Share of the memory free at construction that the KV pool may take, in (0, 1]: device memory, or host memory on a CPU.
    Capped at the blocks that `max_requests` sequences of `max_sequence_length` tokens can use. On a GPU a pool that is
    suspended around the optimizer can have more, say 0.85: the memory that a step also needs is measured and left
    free, and a resume takes what the trainer has left free."""

    max_sequence_length: int | None = None
    """Maximum length of prompt + completion, in tokens. None: the model's `max_position_embeddings`."""

    max_requests: int = 256
    """Maximum number of active (running) sequences. At least 1."""

    max_tokens_per_step: int | None = None
    """Token budget of one forward; decodes are scheduled first, prefill chunks use the rest. At least `max_requests`. None:
    8192 on CUDA, 2048 elsewhere, or `max_requests` if that is more."""

    enable_prefix_caching: bool = True
    """Share full KV blocks between requests with equal prefixes under the same policy version."""

    kv_cache_host_memory_gb: float | None = None
    """Size of a host tier of the prefix cache in GiB, above 0: blocks that the KV pool evicts are kept there, and loaded
    when a prompt starts with them. It is allocated at construction (pinned on CUDA), in addition to the memory of a suspend.
    Not for models with recurrent layers. None: evicted blocks are computed again."""

    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.OFFLOAD
    """Default mode of `suspend`. `persist`: the KV cache stays on the device. `offload`: it is copied to host memory and
    back. `recompute`: it is dropped and prefilled again."""

    max_staleness: int | None = None
    """Maximum number of weight updates between sampling a token and training on it, at least 0. None: unlimited."""

    staleness_policy: StalenessPolicy = StalenessPolicy.PARTIAL
    """Handling of a request that would exceed `max_staleness`. `partial`: it finishes with the tokens it has. `requeue`: it
    starts again from its prompt. `mask`: it continues, and its stale tokens are masked out of the loss."""

    seed: int = 0
    """Base seed of requests without their own seed. In [0, 2**63)."""

    exact: bool = False
    """Sample with log-probs that equal, bit for bit, the trainer's inside `with rollout.exact(model)`, for Llama, Mistral,
    Qwen2 and Qwen3 on a CPU."""

    record_routes: bool = False
    """Record the experts that every router of a mixture of experts chooses, in the KV blocks next to K and V, for
    `RolloutBatch.routed_experts` and `with rollout.replay(batch, model)`. Steps run without CUDA graphs."""

    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype of `torch.autocast` during rollouts: `bfloat16` or `float16`. None: the autocast state around the call, or
    the one that the model's own forward sets (accelerate)."""

    inference_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Sample from a copy of the weights in this dtype, refreshed after each update: `float32`, `bfloat16` or `float16`.
    None together with `inference_device=None`: sample from the trainer's weights, without a copy."""

    inference_device: str | None = None
    """Sample from a copy of the weights on this device, such as `cuda:1`. None: the trainer's device."""

    advanced: Advanced = Advanced()
    """Options that few runs set."""

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
        """`max_tokens_per_step`, or its CPU default if that is None; an engine replaces None by its own budget."""
        return max(2048, self.max_requests) if self.max_tokens_per_step is None else self.max_tokens_per_step


@dataclass(frozen=True, kw_only=True)
class CoordinatorAdvanced(Options):
    """Options for large jobs and slow networks: `CoordinatorConfig(advanced=CoordinatorAdvanced(...))`. Frozen; validated.

    Import it from `rollout.config`."""

    heartbeat_timeout_s: float = 30.0
    """Seconds without incoming traffic after which a peer is considered dead, above 0. Peers send a heartbeat when they have
    sent nothing else for a thirtieth of it."""

    progress_interval: int = 16
    """A rank reports a sample's new tokens each time it has this many, at least 1. Upper bound of the tokens per sample that
    are computed again when the rank dies."""

    no_rank_timeout_s: float = 600.0
    """Seconds without a ready rank after which waiting requests fail with `RequestTimeoutError`. Above 0."""

    max_open_mb: int = 1024
    """Maximum memory of one client's open groups, in MiB: prompts, parameters, known tokens. At least 1."""

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
    """Number of ranks of the job, at least 1. Barriers and deterministic routing wait for this many; other routing works
    with fewer or more."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback requires keys, or `insecure`."""

    inference_coordinator_port: int | None = None
    """TCP port to listen on, in [1, 65535]. None: a free port."""

    insecure: bool = False
    """Allow listening on an address other than loopback without keys. Every process that reaches the port can then submit
    requests, read results and stop the job."""

    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
    """Routing policy: `longest_prefix`, `first_prefix_block`, `load_balanced` or `round_robin`."""

    enable_prefix_caching: bool = True
    """Consider cached prefixes when routing. False: route as `load_balanced`, unless the policy is `round_robin`."""

    block_size_tokens: int = 16
    """Tokens per block hash, at least 1. Must equal every rank's `block_size_tokens`."""

    deterministic_mode: bool = False
    """Route by order of arrival and sorted rank names only, independent of timing. Priority does not affect the choice of
    the rank, and a text prompt keeps its place in the order while it is tokenised."""

    schedule_output_path: str | None = None
    """JSON file to which every routing decision is written when it is taken. A coordinator that replaces a dead one writes
    to `PATH.1`, the next one to `PATH.2`. None: not recorded."""

    seed: int = 0
    """Base seed of requests without their own seed, assigned in order of arrival. In [0, 2**63)."""

    tokenizer: str | None = None
    """Path or content of a `tokenizer.json`, for text prompts and for engines without a tokenizer. None: the tokenizer of
    the `LLM` or `RolloutManager` that starts the coordinator, unless it runs in Python: send token ids then."""

    advanced: CoordinatorAdvanced = CoordinatorAdvanced()
    """Timeouts and bounds that few jobs set."""

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
    """Address to listen on. An address other than loopback requires `api_key`, or `insecure`."""

    port: int = 8000
    """TCP port to listen on, in [0, 65535]. 0: a free port."""

    api_key: str | None = field(default=None, repr=False)
    """Key that clients send as `Authorization: Bearer KEY`, required on every path but /health and /ping: visible ASCII
    characters without spaces. None: no authentication."""

    served_model_name: str | None = None
    """Name of the model in requests and replies. None: the name or path it was loaded from."""

    admin: bool = False
    """Serve the control routes: pause, sleep, weights, abort, ... Requires `api_key`, or `insecure`."""

    insecure: bool = False
    """Allow listening on an address other than loopback, or `admin`, without a key. Every process that reaches the port
    can then use the routes."""

    max_open_requests: int = 4096
    """Maximum number of samples (prompts times n) open over HTTP at the same time, at least 1. More are rejected with status
    429."""

    request_timeout_s: float = 600.0
    """Maximum duration of a request, in seconds, above 0. Also the upper bound of a request's own `timeout_s`."""

    chat_template: str | None = None
    """Jinja chat template, or the path of a file with one. None: the tokenizer's template."""

    shutdown_grace_s: float = 5.0
    """Seconds that running requests may take to finish when the server stops, at least 0; afterwards they are aborted."""

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
    """Return the string below each field of a class as one line, by the field's name."""
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
