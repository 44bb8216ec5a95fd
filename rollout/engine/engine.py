"""The engine of one rank: continuous batching in the training process, with the module that the optimizer updates.

Always true:
- every accepted request finishes exactly once, with a complete record that contains the finish reason;
- an exception inside a step fails the requests of that step (`rollout.engine.parts.stepper`), and the engine continues;
- whenever no engine method is running, the trainer's model is exactly as the trainer left it;
- sharded weights are gathered before the first step and released after the last one; steps run only in between;
- a request runs only while the same adapters are active as when the request was accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.build import EngineBase, EngineParts, build, check_arguments, followed, rebuilt
from rollout.engine.memory.block_pool import Allocate, zeros
from rollout.engine.memory.buffers import plain_tensors
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.adapters import LoraAdapters
from rollout.engine.models.attention import Installation, refuse_inside_forward
from rollout.engine.models.model_support import examine
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.engine.parts.control import EngineControl
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.holds import Holds
from rollout.engine.parts.inspection import Inspection
from rollout.engine.parts.intake import Intake
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.parts.peers import Peers
from rollout.engine.parts.prefill import Prefill, Take, Wanted
from rollout.engine.sampling.token_values import ValueFunction
from rollout.engine.scheduling.adapters import described
from rollout.engine.weights.base import Weights
from rollout.engine.weights.guard import WeightsGuard
from rollout.errors import RequestError, UnsupportedModelError
from rollout.observe.recorder import EngineTap
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from rollout.threads.blocking import called, read
from rollout.threads.diagnosis import answer_signal, watch
from rollout.threads.interrupts import interruptible, uninterrupted
from rollout.threads.locks import Turns


class DynamicInferenceEngine:
    """Continuous batching over a paged KV cache, computed by the training module itself.

    Args:
        model: the `PreTrainedModel` that the optimizer updates. It may be wrapped in DDP or torch.compile, or sharded by
            FSDP2 (then all ranks must build their engines together). It is called, never changed, and copied only
            if `inference_dtype` or `inference_device` is set.
        tokenizer: the model's tokenizer. If None, prompts must be token ids, and the engine produces no text.
        config: the engine's options. If None, all options have their defaults.
        token_values: a function that computes values from hidden states (see `RolloutManager`), or None.
        clock: a function that returns the time in seconds. Tests replace it.
        allocate: a function that allocates the KV pool's tensor. Tests replace it.

    Raises:
        UnsupportedModelError: the engine does not support a part of the model; the message names the part.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: InferenceConfig | None = None,
        *,
        token_values: ValueFunction | None = None,
        clock: Callable[[], float] = time.time,
        allocate: Allocate = zeros,
    ) -> None:
        check_arguments(model, tokenizer, config)
        config = config or InferenceConfig()
        self.lifecycle = Lifecycle()
        """The state machine, and the lock that is held during a step."""
        self.turns = Turns(refuse_inside_forward)
        """The queue of threads that each run steps until their own requests finish, one thread at a time."""
        self.tap = EngineTap(clock, lambda: self.inspection.traced_state(), lambda: self.inspection.traced_records())
        """The object through which the engine reports to the trace recorder, if this process records a trace."""
        with plain_tensors():
            self.guard = WeightsGuard(model, config, self.lifecycle.locked)
            """The object that holds the model and its weights, and detects weight changes that were not announced."""
            self.peers = Peers(self.weights, config)
            """The ranks that compute forward passes together with this rank."""
            self.adapters = LoraAdapters(self.weights.sampled)
            """The LoRA adapters that requests may name."""
            self._base = EngineBase(
                config, self.guard, self.peers, self.adapters, self.lifecycle, self.tap, tokenizer, token_values,
                clock, allocate,
            )  # fmt: skip
            with self.guard.whole(), self._base.under_autocast():
                self.parts: EngineParts = build(self._base)
                """The parts that depend on the model's state when the engine is built; `rebuild` replaces them."""
                if self.peers.lockstep is not None:
                    self.peers.lockstep.learn(lambda: self.controller.runner.module.own_logits([0]))
        self.holds = Holds(self)
        """The holds by which the coordinator, a weight update or the caller keeps the engine from stepping."""
        watch(self)
        answer_signal()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DynamicInferenceEngine cannot be pickled or copied: it owns a KV cache and shares the trained "
            "model; build one where it is needed: DynamicInferenceEngine(model, tokenizer, config)"
        )

    def describe_state(self) -> Iterator[str]:
        """Yield lines of text on lifecycle, holds, lock, scheduler, last step and oldest samples for `threads.diagnosis`."""
        yield f"engine of {type(self.model).__name__}: {self.state.value}, policy version {self.policy_version}"
        yield (
            f"  holds: {self.holds.describe()}; lock: {self.lifecycle.lock.describe()}; turn: {self.turns.describe()}"
        )
        yield from self.inspection.describe()

    def rebuild(self) -> None:
        """Build the engine's parts again from the current model, whose device, dtype or vocabulary may have changed.

        Every rank must call this method inside `guard.whole()`. Unfinished samples continue; their KV is recomputed.

        Raises:
            UnsupportedModelError, InvalidRequestError, ConfigError: see `build`. The engine is then unchanged.
        """
        self.parts = rebuilt(self._base, self.parts)

    @property
    def config(self) -> InferenceConfig:
        """The configuration, in which the device's default replaces a missing `max_tokens_per_step`."""
        return self.parts.config

    @property
    def context(self) -> DynamicInferenceContext:
        """The KV cache, its block allocator and the scheduler with the active requests."""
        return self.parts.context

    @property
    def cache(self) -> KVCache:
        """The KV cache: the memory of the KV blocks."""
        return self.parts.cache

    @property
    def controller(self) -> TextGenerationController:
        """The part that tokenizes, runs the model, samples and detokenizes."""
        return self.parts.controller

    @property
    def inspection(self) -> Inspection:
        """The part that reports the engine's state."""
        return self.parts.inspection

    @property
    def installation(self) -> Installation:
        """A context manager for a block of many steps, in which the engine assumes that the module does not change."""
        return self.controller.runner.installation

    @property
    def weights(self) -> Weights:
        """The source of the weights that the engine samples with."""
        return self.guard.source

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model that the optimizer updates, without wrappers such as DDP."""
        return self.guard.model

    locked = called("lifecycle", Lifecycle.locked)

    def follow_model(self) -> None:
        """Rebuild the engine's parts if windows or masks of attention layers have changed since the last build.

        Do nothing in an `installation` block, or while the weights are sharded. See `build.followed` for the exceptions.
        """
        if not self.installation.active and self.weights.ready:
            self.parts = followed(self._base, self.parts)

    @contextmanager
    def stepping(self, *, follow: bool = True) -> Iterator[None]:
        """Open a block whose steps treat the module as unchanged. If `follow` is True, call `follow_model` first."""
        if follow:
            self.follow_model()
        with self.installation:
            yield

    # --- requests -----------------------------------------------------------------------------------------------

    add_request = called("parts.intake", Intake.add_request)
    check_request = called("parts.intake", Intake.check_request)
    add_record = called("parts.intake", Intake.add_record)
    abort_request = called("parts.intake", Intake.abort_request)
    new_request_id = called("parts.intake", Intake.new_request_id)

    def take_ended(
        self, keys: Callable[[tuple[int, int]], bool] = lambda key: True
    ) -> list[DynamicInferenceRequestRecord]:
        """Return finished records that no step has returned, such as records aborted or found too stale between steps.

        Args:
            keys: a predicate on (request_id, sample_index). Records for which it is False are returned by the next step.
        """
        with self.lifecycle.lock:
            return self.parts.ledger.take(keys)

    def step(self, *, ahead: bool = False) -> list[DynamicInferenceRequestRecord]:
        """Run one step: schedule, execute, update. Return the records that finished since the last step, each exactly once.

        Requests accepted under other adapters wait until those adapters are active again. Meanwhile their KV may be evicted.

        Args:
            ahead: whether to run further decode steps in the same call, for about 30 ms. They stop early if a sample
                finishes, another thread waits, or `ask_for_boundary` is called. Only the fused CPU forward pass can do this.
                The sampled tokens are the same either way.

        Raises:
            EngineStateError: the engine is not RUNNING.
            EngineDeadError: too many steps in a row have failed.
        """
        ended: list[DynamicInferenceRequestRecord] = []
        try:
            with uninterrupted(), self.lifecycle.lock:
                self._step(ahead=ahead)
                ended = self.take_ended()
        except BaseException:
            if ended:
                with uninterrupted(), self.lifecycle.lock:
                    self.parts.ledger.put_back(ended)
            raise
        return ended

    def ask_for_boundary(self) -> None:
        """Ask a running `step(ahead=True)` to return soon. Any thread may call this method; it does not wait."""
        self.lifecycle.lock.ask()

    def _step(self, *, ahead: bool) -> None:
        refuse_inside_forward()
        lifecycle = self.lifecycle
        with uninterrupted(), lifecycle.lock:
            if lifecycle.cause_of_death is not None and self.parts.ledger.ended:
                return
            lifecycle.refuse_unless_running()
            self.peers.refuse_alone()
            if not self.weights.ready:
                self.guard.refuse_scattered()
                with interruptible():
                    self.weights.gather()
            self.follow_model()
            with plain_tensors():
                self.parts.stepper.step(ahead=ahead)
                if lifecycle.cause_of_death is not None:
                    lifecycle.moved()

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequest]:
        """Run prompts until they finish. If another thread is generating, wait until its call returns first.

        The next `step` returns other callers' requests that finish during this call. If this call raises, the next `step`
        also returns this call's requests.

        Returns:
            One request per sample, with its record's segments merged, in the order of the prompts and then of the samples.

        Raises:
            InvalidRequestError: a prompt can never be served; no prompt of this call was queued.
            EngineStateError: the engine is not RUNNING; no prompt of this call was queued.
            WeightsChangedError: the weights changed without an announced update; no prompt of this call was queued.
            RequestError: a request failed. The results of the other requests are lost; use `RolloutManager` to keep them.
        """
        with self.turns.taken(), plain_tensors():
            self.lifecycle.refuse_unless_running()
            self.peers.refuse_alone()
            self.check_weights()
            with self.guard.whole(), self.stepping():
                numbers = self.parts.intake.add_all(prompts, sampling_params or SamplingParams())
                mine = set(numbers)
                while not mine.isdisjoint(self.parts.ledger.live):
                    self.inspection.refuse_when_nothing_can_run()
                    self._step(ahead=True)
            taken = self.take_ended(lambda key: key[0] in mine)
        ended = {(record.request_id, record.sample_index): record for record in taken}
        samples = range((sampling_params or SamplingParams()).n)
        results = [ended[number, index].merge() for number in numbers for index in samples]
        for result in results:
            if result.error is not None:
                raise RequestError(f"request {result.request_id}: {result.error}", result.request_id)
        return results

    def logits_at(self, wanted: Sequence[Wanted], take: Take) -> tuple[int, str]:
        """Compute logits of given sequences, without sampling, while requests in flight wait.

        Args:
            wanted: the sequences, each with the positions whose logits are needed.
            take: a callback that receives the logits chunk by chunk; see `Take`.

        Returns:
            The policy version that computed the logits, and the names of the model's active adapters.

        Raises:
            InvalidRequestError: this engine cannot compute one of the sequences; no sequence was computed.
            UnsupportedModelError: the weights are split over a group of ranks.
            EngineStateError: the engine is not RUNNING.
            WeightsChangedError: the weights changed without an announced update.
        """
        if (group := self.peers.everyone) is not None:
            raise UnsupportedModelError(
                f"score: the weights are split over the {group.name}, whose members compute requests together and "
                "nothing else; score with the model's own forward, or with an engine of an unsplit copy"
            )
        with self.turns.taken(), plain_tensors():
            self.lifecycle.refuse_unless_running()
            self.check_weights()
            with self.guard.whole(), self.lifecycle.lock, self.stepping():
                self.lifecycle.refuse_unless_running()
                variant = self.parts.stepper.follow_forward()
                Prefill(self.config, self.controller.runner, self.context, self.parts.intake).run(wanted, take)
                return self.policy_version, described(variant)

    # --- state changes ------------------------------------------------------------------------------------------

    pause = called("parts.control", EngineControl.pause)
    unpause = called("parts.control", EngineControl.unpause)
    suspend = called("parts.control", EngineControl.suspend)
    resume = called("parts.control", EngineControl.resume)
    stop = called("parts.control", EngineControl.stop)
    weights_updated = called("parts.control", EngineControl.weights_updated)
    adapter_switch = called("parts.control", EngineControl.adapter_switch)
    load_weights = called("parts.control", EngineControl.load_weights)
    load_adapter = called("parts.control", EngineControl.load_adapter)
    unload_adapter = called("parts.control", EngineControl.unload_adapter)
    flush_prefix_cache = called("parts.control", EngineControl.flush_prefix_cache)
    track_prefix_cache = called("parts.control", EngineControl.track_prefix_cache)
    has_unfinished = read("parts.inspection", Inspection.has_unfinished)
    stats = called("parts.inspection", Inspection.stats)
    snapshot = called("parts.inspection", Inspection.snapshot)
    progress = called("parts.inspection", Inspection.progress)
    explain = called("parts.inspection", Inspection.explain)

    @property
    def state(self) -> EngineState:
        """The lifecycle state."""
        return self.lifecycle.state

    @property
    def policy_version(self) -> int:
        """The current policy version, which rises with every weight update."""
        return self.context.scheduler.version

    @property
    def load(self) -> tuple[int, int]:
        """The number of running samples, and the number of waiting samples."""
        return self.context.scheduler.num_active, self.context.scheduler.num_waiting

    def wait_until(self, state: EngineState, timeout_s: float | None = None) -> None:
        """Block until the engine is in `state`, which must be a stable state (one of `STABLE_ENGINE_STATES`).

        Args:
            state: the state to wait for.
            timeout_s: the longest wait in seconds. If None, `Advanced.control_timeout_s` applies.

        Raises:
            ValueError: `state` is transient.
            DeadlineError: the engine did not reach `state` in time.
        """
        self.lifecycle.wait_until(state, self.config.advanced.control_timeout_s if timeout_s is None else timeout_s)

    def check_weights(self) -> None:
        """Raise `WeightsChangedError` if the weights changed without an announced update; see `WeightsGuard.check`."""
        self.guard.check(self.policy_version, self.controller.layout.vocab_size)


@dataclass(frozen=True)
class Support:
    """The result of `inspect`: which of the engine's requirements a model meets, and which it does not.

    `str()` returns one line per requirement. `bool()` returns True if the model meets all requirements.
    """

    present: tuple[str, ...]
    """The requirements that the model meets."""
    missing: tuple[str, ...]
    """The reasons why building an engine for the model would raise, each with its cure."""

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return "\n".join(
            [*(f"present  {each}" for each in self.present), *(f"MISSING  {each}" for each in self.missing)]
        )


def inspect(model: nn.Module, config: InferenceConfig | None = None) -> Support:
    """List which of the engine's requirements a model meets, without stopping at the first one that it does not meet.

    If the model meets all, build an engine and compare its chunked forward pass with the model's own forward pass.
    If the weights are sharded over several ranks, every rank must call this function.

    Args:
        model: the model that would be passed to `RolloutManager`.
        config: the engine's options. If None, all options have their defaults, except for a small KV cache.
    """
    config = config or InferenceConfig(kv_cache_memory_gb=0.05)
    examined = examine(model, config.max_sequence_length)
    present, missing = examined.present, examined.missing
    if not missing:
        try:
            found = DynamicInferenceEngine(model, None, config).explain()
        except UnsupportedModelError as exc:
            missing = [str(exc)]
        else:
            runs = "fused" if found.fused else f"the module's own, because {found.why_not_fused or 'it is sharded'}"
            present = [*present, "numbers: a forward in chunks equals the model's own", f"served by: {runs}"]
    return Support(tuple(present), tuple(missing))
