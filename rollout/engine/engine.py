"""The engine of one rank: continuous batching in the training process, with the module that the optimizer steps.

Always true:
- every accepted request ends once, as a complete record: finished, stale, aborted or failed;
- an exception inside a step fails the requests of that step, cause attached, or the one request that was just being
  admitted, and the engine goes on; after `MAX_FAILED_STEPS` in a row it declares itself dead and ends every request;
- whenever none of its calls is running, the trainer's model is exactly as the trainer left it;
- weights that the ranks share are whole between `gather_weights` and `release_weights`, and steps run only there;
- a request that was accepted while some adapters acted runs while these act, and waits while others do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from typing import Any, NoReturn

from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.build import EngineBase, EngineParts, build, check_arguments, followed, rebuilt
from rollout.engine.explain.explanation import Explanation
from rollout.engine.memory.block_pool import Allocate, zeros
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.plain_tensors import plain_tensors
from rollout.engine.models.adapters import LoraAdapters
from rollout.engine.models.attention import Installation, refuse_inside_forward
from rollout.engine.parts.context import DynamicInferenceContext, MemoryMove
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.holds import Holds
from rollout.engine.parts.inspection import Inspection
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.parts.peers import Peers
from rollout.engine.parts.prefill import Prefill, Take, Wanted
from rollout.engine.scheduling.adapters import described
from rollout.engine.scheduling.prefix_index import CacheChanges
from rollout.engine.weights.base import Weights
from rollout.engine.weights.guard import WeightsGuard
from rollout.errors import RequestError, UnsupportedModelError
from rollout.requests.delta import SampleDelta
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each
from rollout.state import EngineState, Mode
from rollout.threads.diagnosis import answer_signal, watch
from rollout.threads.interrupts import interruptible, uninterrupted
from rollout.threads.turns import Turns
from rollout.tracing.recorder import EngineTap


class DynamicInferenceEngine:
    """Continuous batching over a paged KV cache, by the training module itself.

    Args:
        model: the `PreTrainedModel` the optimizer steps, also wrapped in DDP, FSDP1 or torch.compile, or sharded by FSDP2
            (then every rank builds its engine at the same time). It is called, never changed, and copied only where
            `inference_dtype` or `inference_device` ask for it.
        tokenizer: its tokenizer, or None where prompts are token ids and no text is asked for.
        config: see `InferenceConfig`.
        clock: seconds; a seam for tests.
        allocate: makes the KV pool's tensor; a seam for tests.

    Raises:
        UnsupportedModelError: the model does something the engine cannot honour; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: InferenceConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        allocate: Allocate = zeros,
    ) -> None:
        check_arguments(model, tokenizer, config)
        config = config or InferenceConfig()
        self.lifecycle = Lifecycle()
        """The state machine, and the lock of the step boundary."""
        self.turns = Turns(refuse_inside_forward)
        """One is taken by every caller that steps until requests have ended."""
        self.tap = EngineTap(self, clock)
        """Tells a trace of this process what the engine does."""
        with plain_tensors():
            self.guard = WeightsGuard(model, config, self.lifecycle.locked)
            """The model, its weights, and whether they changed without an announcement."""
            self.peers = Peers(self.weights, config)
            """The ranks that compute forwards together with this one."""
            self.adapters = LoraAdapters(self.weights.sampled)
            """LoRA adapters that requests may name."""
            self._base = EngineBase(
                config, self.guard, self.peers, self.adapters, self.lifecycle, self.tap, tokenizer, clock, allocate
            )
            with self.guard.whole(), self._base.under_autocast():
                self.parts: EngineParts = build(self._base)
                """The parts that depend on the model as it was when they were built; `rebuild` replaces them."""
                if self.peers.lockstep is not None:
                    self.peers.lockstep.learn(lambda: self.controller.forward_logits([0]))
        self.holds = Holds(self)
        """Named holds under which no step is made: of the coordinator, a weight update, the caller."""
        watch(self)
        answer_signal()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DynamicInferenceEngine cannot be pickled or copied: it holds the KV cache beside the very model that is "
            "trained; build one where it is needed: DynamicInferenceEngine(model, tokenizer, config)"
        )

    def describe_state(self) -> Iterator[str]:
        """Lines for `rollout.threads.diagnosis`: lifecycle, holds, lock, turn, scheduler, last step, oldest samples."""
        yield f"engine of {type(self.model).__name__}: {self.state.value}, policy version {self.policy_version}"
        yield (
            f"  holds: {self.holds.describe()}; lock: {self.lifecycle.lock.describe()}; turn: {self.turns.describe()}"
        )
        yield from self.inspection.describe()

    def rebuild(self) -> None:
        """Build the parts again from the model as it is now, whose device, dtype or vocabulary may have changed.

        Every rank calls it inside `guard.whole()`. Unfinished samples continue; their KV is computed again.

        Raises:
            UnsupportedModelError, InvalidRequestError: not with this model; everything is as it was before.
            ConfigError: not with this configuration, as above.
        """
        self.parts = rebuilt(self._base, self.parts)

    @property
    def config(self) -> InferenceConfig:
        """The configuration, with the token budget of a step filled in."""
        return self.parts.config

    @property
    def context(self) -> DynamicInferenceContext:
        """The KV blocks, and what is active in them."""
        return self.parts.context

    @property
    def cache(self) -> KVCache:
        """The memory of the KV blocks."""
        return self.parts.cache

    @property
    def controller(self) -> TextGenerationController:
        """Tokenises, runs the model, samples and detokenises."""
        return self.parts.controller

    @property
    def inspection(self) -> Inspection:
        """Reads the state of the engine."""
        return self.parts.inspection

    @property
    def installation(self) -> Installation:
        """A context manager of many steps, between which the module counts as unchanged; each step enters it anyway."""
        return self.controller.runner.installation

    @property
    def weights(self) -> Weights:
        """The source of the weights."""
        return self.guard.source

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model the optimizer steps, without its wrappers."""
        return self.guard.model

    def locked(self) -> AbstractContextManager[None]:
        """Several calls at one step boundary: no step of another thread comes between them."""
        return self.lifecycle.locked()

    def follow_model(self) -> None:
        """Build the parts again if windows, chunks or masks of attention layers have changed since they were built.

        Every way to `step` calls it, with whole weights, wherever the caller had the module. Raises: see `followed`.
        """
        if not self.installation.active and self.weights.ready:
            self.parts = followed(self._base, self.parts)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A block of steps between which the module counts as unchanged, after `follow_model`."""
        self.follow_model()
        with self.installation:
            yield
        self.parts.context.prepare_suspend()

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        metadata: Any = None,
        samples: Sequence[int] | None = None,
        arrival_time: float | None = None,
        client: Hashable = None,
    ) -> int:
        """Accept one prompt (and its n samples); it runs in the coming steps.

        Args:
            prompt: text, token ids, chat messages, or what a processor returned for one prompt with images.
            request_id: yours, or None for the engine's next.
            priority: higher runs first; equal ones in order of arrival.
            metadata: msgpack-able, returned untouched in the results.
            samples: those of the n samples to compute, others of the same request may be here; None: all.
            arrival_time: seconds by the engine's clock, from which times are counted; None: now.
            client: within a priority, clients with waiting requests get equal shares of the tokens, and the requests of
                one client run in order of arrival. All callers that leave it out are one client.

        Returns:
            The request id.

        Raises:
            InvalidRequestError: it can never be served as asked; nothing was queued.
            EngineStateError: the engine is stopping or stopped.
        """
        (params,) = one_each(sampling_params, 1)
        return self.parts.intake.add(prompt, params, request_id, priority, metadata, samples, arrival_time, client)

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """Token ids of a prompt that `add_request` would accept; nothing is queued.

        Raises:
            InvalidRequestError, ConfigError, TypeError: it would refuse it.
        """
        return self.parts.intake.check(prompt, sampling_params)

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Continue an unfinished record (from `snapshot`, another engine or a checkpoint file) where it stands.

        Raises:
            InvalidRequestError: it can never be served here; nothing was queued.
        """
        self.parts.intake.add_record(record)

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        """End a request now, in any state; its blocks are free before this returns.

        Returns:
            How many samples were ended (0: it had finished, or never was).
        """
        return self.parts.intake.abort(request_id, sample_index)

    def take_ended(
        self, keys: Callable[[tuple[int, int]], bool] = lambda key: True
    ) -> list[DynamicInferenceRequestRecord]:
        """Records that have ended and that no step has returned yet: aborted or too stale between two steps.

        Args:
            keys: which (request_id, sample_index) to take; the others stay for the next step.
        """
        return self.parts.intake.take_ended(keys)

    def new_request_id(self) -> int:
        """Reserve and return a request id."""
        return self.parts.intake.new_id()

    def step(self, *, ahead: bool = False) -> list[DynamicInferenceRequestRecord]:
        """Schedule, execute, update. Returns the records that have ended since the last step, each exactly once.

        Args:
            ahead: make further decode steps in the same call, for about 30 ms, if the fused CPU forward or a CUDA graph can:
                until a sample ends, another thread waits, or `ask_for_boundary` is called. The tokens are the same.

        Requests that were accepted under other adapters wait until these act again; their KV may be evicted meanwhile.

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
        """Let a running `step(ahead=True)` return as soon as it can. Any thread may call it; it does not wait."""
        self.lifecycle.lock.ask()

    def _step(self, *, ahead: bool) -> None:
        """Make a step; the records that have ended stay in the ledger."""
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
        """Run prompts to their end. A second thread's call waits until the first one returns.

        Other requests that end meanwhile, and those of a call that raises, are returned by the next `step`.

        Returns:
            One merged request per sample, in the order of the prompts, samples side by side.

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
        """Compute logits of given sequences, without sampling; `RolloutManager.score` makes log-probs of them.

        Requests in flight stand still meanwhile.

        Args:
            take: gets the logits chunk by chunk.

        Returns:
            The policy version and the names of the model's own adapters that acted; those that sequences name are theirs.

        Raises:
            InvalidRequestError: a sequence cannot be computed by this engine; nothing was.
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
                Prefill(self.config, self.controller.runner, self.context, self.parts.admission).run(wanted, take)
                return self.policy_version, described(variant)

    # --- control, documented in `parts.control` --------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The lifecycle state."""
        return self.lifecycle.state

    def pause(self) -> None:
        """Stop stepping at the next step boundary; requests keep their KV and wait."""
        self.parts.control.pause()

    def unpause(self) -> None:
        """Allow steps again."""
        self.parts.control.unpause()

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Free the KV cache's device memory as `mode` (None: the configured mode) says."""
        return self.parts.control.suspend(mode, keep_prefix_cache=keep_prefix_cache)

    def resume(self) -> MemoryMove:
        """Bring the KV cache back to the device; the engine is PAUSED then."""
        return self.parts.control.resume()

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        """Stop the engine. Every unfinished request ends with an error; returns all records not handed out yet."""
        return self.parts.control.stop()

    def wait_until(self, state: EngineState, timeout_s: float | None = None) -> None:
        """Block until the engine is in a stable state.

        Raises:
            ValueError: `state` is a transient one.
            DeadlineError: not reached within `timeout_s` (None: `control_timeout_s`).
        """
        self.lifecycle.wait_until(state, self.config.advanced.control_timeout_s if timeout_s is None else timeout_s)

    def weights_updated(self, version: int | None = None) -> int:
        """Announce changed weights; returns the new policy version."""
        return self.parts.control.weights_updated(version)

    def check_weights(self) -> None:
        """Refuse weights that changed without an announced update; see `WeightsGuard.check`."""
        self.guard.check(self.policy_version, self.controller.layout.vocab_size)

    def adapter_switch(self, what: str | None = None) -> AbstractContextManager[None]:
        """A block that changes which adapters of the model act, between two steps."""
        return self.parts.control.adapter_switch(what)

    def load_weights(self, folder: str | PathLike[str]) -> int:
        """Load the weights of a folder; returns the number of tensors."""
        return self.parts.control.load_weights(folder)

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> int:
        """Load a LoRA adapter; returns the number of layers that it changes."""
        return self.parts.control.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter; returns the number of samples that have ended by it."""
        return self.parts.control.unload_adapter(name)

    def flush_prefix_cache(self) -> int:
        """Drop every cached block that no request holds; returns their number."""
        return self.parts.control.flush_prefix_cache()

    def track_prefix_cache(self, changes: CacheChanges | None) -> list[int]:
        """Record changes of the prefix cache in `changes` (None: nowhere); returns the hashes cached now."""
        return self.parts.control.track_prefix_cache(changes)

    # --- state: `inspection` documents these -----------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.context.scheduler.version

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something left to do or to hand out, with the adapters that act now."""
        return self.inspection.has_unfinished

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) samples."""
        return self.context.scheduler.num_active, self.context.scheduler.num_waiting

    def stats(self) -> dict[str, float]:
        """Counters since construction and present gauges, by the names of `ENGINE_STATS`."""
        return self.inspection.stats()

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Copies of the records of all unfinished samples, in scheduling order."""
        return self.inspection.snapshot()

    def progress(self, known: Mapping[tuple[int, int], tuple[int, int, int]]) -> list[SampleDelta]:
        """Tokens that unfinished samples have gained since `known`."""
        return self.inspection.progress(known)

    def explain(self) -> Explanation:
        """Explain what the engine does with this model on this machine, and why; `print` it."""
        return self.inspection.explain()
