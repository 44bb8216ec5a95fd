"""The engine of one rank: continuous batching in the training process, with the module that the optimizer steps.

Always true:
- every accepted request ends once, as a complete record: finished, stale, aborted or failed;
- an exception inside a step fails the requests of that step (`rollout.engine.parts.stepper`), and the engine continues;
- whenever none of its calls is running, the trainer's model is exactly as the trainer left it;
- weights that the ranks share are whole between `gather_weights` and `release_weights`, and steps run only there;
- a request runs only while the adapters that were active when it was accepted are active again.
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
    """Continuous batching over a paged KV cache, by the training module itself.

    Args:
        model: the `PreTrainedModel` the optimizer steps, also wrapped in DDP or torch.compile, or sharded by FSDP2
            (then every rank builds its engine at the same time). It is called, never changed, and copied only if
            `inference_dtype` or `inference_device` is set.
        tokenizer: its tokenizer; None: prompts are token ids, and no text is produced.
        config: see `InferenceConfig`.
        token_values: see `RolloutManager`.
        clock: returns seconds; tests replace it.
        allocate: makes the KV pool's tensor; tests replace it.

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
        """The state machine, and the lock of the step boundary."""
        self.turns = Turns(refuse_inside_forward)
        """The queue of the threads that step until their requests finish."""
        self.tap = EngineTap(clock, lambda: self.inspection.traced_state(), lambda: self.inspection.traced_records())
        """The engine's reports to a trace of this process."""
        with plain_tensors():
            self.guard = WeightsGuard(model, config, self.lifecycle.locked)
            """The model, its weights, and whether they changed without an announcement."""
            self.peers = Peers(self.weights, config)
            """The ranks that compute forwards together with this one."""
            self.adapters = LoraAdapters(self.weights.sampled)
            """LoRA adapters that requests may name."""
            self._base = EngineBase(
                config, self.guard, self.peers, self.adapters, self.lifecycle, self.tap, tokenizer, token_values,
                clock, allocate,
            )  # fmt: skip
            with self.guard.whole(), self._base.under_autocast():
                self.parts: EngineParts = build(self._base)
                """The parts that depend on the model as it was when they were built; `rebuild` replaces them."""
                if self.peers.lockstep is not None:
                    self.peers.lockstep.learn(lambda: self.controller.runner.module.own_logits([0]))
        self.holds = Holds(self)
        """Reasons why the engine does not step: the coordinator, a weight update, the caller."""
        watch(self)
        answer_signal()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DynamicInferenceEngine cannot be pickled or copied: it owns a KV cache and shares the trained "
            "model; build one where it is needed: DynamicInferenceEngine(model, tokenizer, config)"
        )

    def describe_state(self) -> Iterator[str]:
        """Yield lines for `rollout.threads.diagnosis`: lifecycle, holds, lock, scheduler, last step, oldest samples."""
        yield f"engine of {type(self.model).__name__}: {self.state.value}, policy version {self.policy_version}"
        yield (
            f"  holds: {self.holds.describe()}; lock: {self.lifecycle.lock.describe()}; turn: {self.turns.describe()}"
        )
        yield from self.inspection.describe()

    def rebuild(self) -> None:
        """Build the parts again from the model as it is now, whose device, dtype or vocabulary may have changed.

        Every rank calls it inside `guard.whole()`. Unfinished samples continue; their KV is computed again.

        Raises:
            UnsupportedModelError, InvalidRequestError, ConfigError: see `build`; nothing has changed.
        """
        self.parts = rebuilt(self._base, self.parts)

    @property
    def config(self) -> InferenceConfig:
        """The configuration, with the token budget of a step filled in."""
        return self.parts.config

    @property
    def context(self) -> DynamicInferenceContext:
        """The KV blocks and the active requests."""
        return self.parts.context

    @property
    def cache(self) -> KVCache:
        """The memory of the KV blocks."""
        return self.parts.cache

    @property
    def controller(self) -> TextGenerationController:
        """The part that tokenises, runs the model, samples and detokenises."""
        return self.parts.controller

    @property
    def inspection(self) -> Inspection:
        """The part that reads the state of the engine."""
        return self.parts.inspection

    @property
    def installation(self) -> Installation:
        """A context manager around many steps, in which the module counts as unchanged."""
        return self.controller.runner.installation

    @property
    def weights(self) -> Weights:
        """The source of the weights."""
        return self.guard.source

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model the optimizer steps, without its wrappers."""
        return self.guard.model

    locked = called("lifecycle", Lifecycle.locked)

    def follow_model(self) -> None:
        """Build the parts again if windows or masks of attention layers have changed since they were built.

        Called with whole weights before steps, whenever the caller may have used the module. Raises: see `followed`.
        """
        if not self.installation.active and self.weights.ready:
            self.parts = followed(self._base, self.parts)

    @contextmanager
    def stepping(self, *, follow: bool = True) -> Iterator[None]:
        """Enclose steps between which the module counts as unchanged. `follow`: call `follow_model` first."""
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
        """Return records that finished between two steps (aborted or too stale) and that no step has returned.

        Args:
            keys: selects records by (request_id, sample_index); the other records stay for the next step.
        """
        with self.lifecycle.lock:
            return self.parts.ledger.take(keys)

    def step(self, *, ahead: bool = False) -> list[DynamicInferenceRequestRecord]:
        """Run one step: schedule, execute, update. Return the records that finished since the last step, each exactly once.

        Requests that were accepted under other adapters wait until those are active again; their KV may be evicted in the
        meantime.

        Args:
            ahead: make further decode steps in the same call, for about 30 ms, if the fused CPU forward or a CUDA graph can:
                until a sample finishes, another thread waits, or `ask_for_boundary` is called. The tokens are the same.

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
        """Run prompts until they finish. A second thread's call waits until the first one returns.

        The next `step` returns other requests that finish in the meantime, and the requests of a call that raises.

        Returns:
            One merged request per sample, in the order of the prompts, samples next to each other.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
            EngineStateError: the engine is not RUNNING; nothing of this call was queued.
            WeightsChangedError: see `check_weights`; nothing of this call was queued.
            RequestError: a request failed; the others' results are lost (use `RolloutManager` to keep them).
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
            take: gets the logits chunk by chunk.

        Returns:
            The policy version, and the names of the model's active adapters.

        Raises:
            InvalidRequestError: this engine cannot compute a sequence; none was computed.
            UnsupportedModelError: the weights are split over a group of ranks.
            EngineStateError: the engine is not RUNNING.
            WeightsChangedError: see `check_weights`.
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
        """The number of weight updates so far."""
        return self.context.scheduler.version

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting samples."""
        return self.context.scheduler.num_active, self.context.scheduler.num_waiting

    def wait_until(self, state: EngineState, timeout_s: float | None = None) -> None:
        """Block until the engine is in a stable state.

        Raises:
            ValueError: `state` is transient.
            DeadlineError: the state was not reached within `timeout_s` (None: `control_timeout_s`).
        """
        self.lifecycle.wait_until(state, self.config.advanced.control_timeout_s if timeout_s is None else timeout_s)

    def check_weights(self) -> None:
        """Raise if weights changed without an announced update; see `WeightsGuard.check`."""
        self.guard.check(self.policy_version, self.controller.layout.vocab_size)


@dataclass(frozen=True)
class Support:
    """The engine's requirements, and whether a model meets them. `str()` has a line for each; `bool()`: none is missing."""

    present: tuple[str, ...]
    missing: tuple[str, ...]
    """The reasons why construction raises, each with its cure."""

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return "\n".join(
            [*(f"present  {each}" for each in self.present), *(f"MISSING  {each}" for each in self.missing)]
        )


def inspect(model: nn.Module, config: InferenceConfig | None = None) -> Support:
    """List the engine's requirements of a model, as present or missing, without stopping at the first missing one.

    If nothing is missing, an engine with a small KV cache is built, and its forward in chunks is compared with the model's
    own. On several ranks that share the weights every rank calls it.

    Args:
        model: the model, as `RolloutManager` takes it.
        config: options of the engine. None: defaults.
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
