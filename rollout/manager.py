"""What a training loop holds: prompts in, a batch out, the KV cache out of the way while the optimizer works.

    rollout = RolloutManager(model, tokenizer, InferenceConfig(...))
    batch = rollout.generate(prompts, SamplingParams(n=8, max_tokens=256))
    with rollout.suspended():
        loss.backward(); optimizer.step()

Promises: a group that was accepted is handed out exactly once, whole; whatever raises, what is in flight stays in flight
and the next call goes on with it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn
from tqdm import tqdm

from rollout.batch import RolloutBatch
from rollout.config import InferenceConfig
from rollout.engine.context import MemoryMove
from rollout.engine.controller import Prompt
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import (
    ConfigError,
    DeadlineError,
    EngineStateError,
    InvalidRequestError,
    RolloutFailedError,
    SerializationError,
)
from rollout.metrics import MetricsRecorder
from rollout.record import DynamicInferenceRequestRecord
from rollout.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState, FinishReason, KVCacheManagementMode, StalenessPolicy

STATE_FORMAT = 1

_COUNTERS = (
    "steps", "requests_failed", "requests_aborted", "requests_stale", "requests_requeued", "prompt_tokens",
    "preemptions", "preemption_tokens_recomputed", "generated_tokens", "prefill_tokens_computed", "prefill_tokens_saved",
    "prefix_hits_refused_version", "kv_blocks_copied", "kv_blocks_evicted",
)  # fmt: skip
_GAUGES = ("requests_running", "requests_waiting", "policy_version", "kv_blocks_used", "kv_blocks_cached", "kv_blocks_free")


@dataclass
class _Group:
    """One prompt on its way: complete when all its samples have ended."""

    size: int
    results: dict[int, DynamicInferenceRequest] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.results) == self.size


class RolloutManager:
    """Rollouts from the module the optimizer steps.

    Args:
        model: the Hugging Face causal model being trained.
        tokenizer: its tokenizer; None where prompts are token ids and no text is asked for.
        config: see `InferenceConfig`; None: defaults.
        engine: an engine made elsewhere, instead of `model`, `tokenizer` and `config` making one.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: InferenceConfig | None = None,
        *,
        engine: DynamicInferenceEngine | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.engine = engine or DynamicInferenceEngine(model, tokenizer, config)
        self.config = self.engine.config
        self._clock = clock
        self._metrics = MetricsRecorder(clock)
        self._counted = dict.fromkeys(_COUNTERS, 0.0)
        self._groups: dict[int, _Group] = {}
        self._resume_on_demand = False
        self._inside_suspended = 0

    # --- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        min_groups: int | None = None,
        metadata: Sequence[Any] | None = None,
        on_error: Literal["raise", "mask"] = "raise",
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> RolloutBatch:
        """Sample completions; blocks until they are done.

        Args:
            prompts: texts, token id sequences, or lists of chat messages; `[]` is allowed.
            sampling_params: for all prompts, or one per prompt; `n` samples per prompt.
            min_groups: None: exactly these prompts are returned, all of them. A number: returns as soon as that many
                groups (a prompt with its samples) have ended, counting what earlier calls left in flight; the rest stays
                in flight and is continued by the next call, after the weight update. With `max_staleness` set it also
                waits for every group that another update would make too old, so that none is thrown away.
            metadata: one msgpack-able object per prompt, returned in `batch.metadata`.
            on_error: `raise`: a failed sample raises `RolloutFailedError`, which carries the whole batch. `mask`: its row
                is masked out and named in `batch.errors`.
            progress: a progress bar. None: on a terminal, once a call takes more than two seconds.
            timeout_s: give up after this many seconds; what is in flight stays in flight.

        Returns:
            Samples of a prompt side by side, prompts in order of submission.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
            EngineStateError: the engine is paused or suspended by an explicit call, or stopped.
            DeadlineError: `timeout_s` has passed.
            RolloutFailedError: see `on_error`.
        """
        if on_error not in ("raise", "mask"):
            raise ConfigError(f"on_error={on_error!r}: must be 'raise' or 'mask'")
        if min_groups is not None and (isinstance(min_groups, bool) or min_groups < 0):
            raise ConfigError(f"min_groups={min_groups!r}: must be None or an integer of at least 0")
        self._ensure_running()
        mine = self.submit(prompts, sampling_params, metadata=metadata)
        try:
            if min_groups is None:
                self._run(lambda: all(self._groups[each].complete for each in mine), mine, progress, timeout_s)
                return self._hand_out(mine, on_error)
            wanted = min(min_groups, len(self._groups))
            self._run(lambda: self._enough(wanted), list(self._groups), progress, timeout_s, goal=wanted)
            return self._hand_out([each for each, group in self._groups.items() if group.complete], on_error)
        except (KeyboardInterrupt, SystemExit):
            self.abort(each for each in mine if each in self._groups)
            raise

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        metadata: Sequence[Any] | None = None,
    ) -> list[int]:
        """Queue prompts; they run during the coming `generate` and `as_completed` calls. Returns their group ids.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one string: pass a list of prompts, [prompt] for one")
        params = _one_each("sampling_params", sampling_params, len(prompts), SamplingParams)
        extras = [None] * len(prompts) if metadata is None else list(metadata)
        if len(extras) != len(prompts):
            raise ConfigError(f"metadata has {len(extras)} entries for {len(prompts)} prompts: one each is needed")
        added: list[int] = []
        for index, (prompt, each, extra) in enumerate(zip(prompts, params, extras, strict=True)):
            try:
                added.append(self.engine.add_request(prompt, each, metadata=extra))
            except Exception as exc:
                self.abort(added)
                if isinstance(exc, InvalidRequestError):
                    raise InvalidRequestError(f"prompts[{index}]: {exc}", exc.request_id) from exc
                raise
            self._groups[added[-1]] = _Group(each.n)
        return added

    def as_completed(
        self, group_ids: Iterable[int] | None = None, *, on_error: Literal["raise", "mask"] = "raise"
    ) -> Iterator[RolloutBatch]:
        """Run, and yield each group as it ends (those submitted meanwhile too, when `group_ids` is None).

        Raises:
            KeyError: a group id that was never given out, or was handed out already.
        """
        chosen = None if group_ids is None else set(group_ids)
        if chosen is not None and (unknown := chosen - set(self._groups)):
            raise KeyError(f"groups {sorted(unknown)} are not in flight: they were handed out already or never submitted")
        while True:
            mine = [each for each in self._groups if chosen is None or each in chosen]
            if not mine:
                return
            self._ensure_running()
            self._run(lambda mine=mine: any(self._groups[each].complete for each in mine), mine, False, None)  # type: ignore[misc]
            for each in mine:
                if self._groups[each].complete:
                    yield self._hand_out([each], on_error)

    def abort(self, group_ids: Iterable[int]) -> None:
        """End groups now, handing nothing out; their KV blocks are free when this returns."""
        for each in list(group_ids):
            self.engine.abort_request(each)
            self._groups.pop(each, None)

    @property
    def groups_in_flight(self) -> int:
        """Groups submitted and not yet handed out."""
        return len(self._groups)

    # --- around the optimizer -----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.engine.policy_version

    def weights_updated(self) -> int:
        """The weights have changed: version + 1. The optimizer hook calls this; call it yourself without one."""
        version = self.engine.weights_updated()
        self._sync_metrics()
        return version

    def pause(self) -> None:
        """Stop generating; `generate` refuses until `unpause`."""
        self.engine.pause()
        self._resume_on_demand = False

    def unpause(self) -> None:
        """Allow generating again."""
        self.engine.unpause()

    def suspend(self, mode: KVCacheManagementMode | str | None = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Take the KV cache off the device, until `resume`.

        Args:
            mode: `persist`, `offload` or `recompute`; None: the configuration's.
            keep_prefix_cache: keep cached blocks that no request holds, too; False before the weights change.
        """
        return self._suspend(mode, keep_prefix_cache, on_demand=False)

    def resume(self) -> MemoryMove:
        """Bring the KV cache back and allow generating again. Harmless when running."""
        with self._metrics.phase("resume"):
            before = self.engine.state
            move = self.engine.resume()
            self.engine.unpause()
        self._resume_on_demand = False
        if before is EngineState.SUSPENDED:
            self._metrics.add("rollout/resumes")
            self._metrics.add("rollout/resume_bytes", move.bytes_copied)
            self._metrics.add("rollout/tokens_recomputed", move.tokens_given_up)
            self._metrics.add("rollout/resume_fallbacks", move.requests_given_up)
            self._metrics.add("rollout/kv_blocks_lost", move.shrunk_by_blocks)
            block_bytes = self.engine.cache.block_bytes
            self._metrics.add(
                "rollout/resume_tokens_restored", move.bytes_copied // block_bytes * self.config.block_size_tokens
            )
        return move

    @contextmanager
    def suspended(self, mode: KVCacheManagementMode | str | None = None) -> Iterator[None]:
        """The KV cache is off the device inside; the first `generate` afterwards brings it back.

        Cached blocks that no request holds are dropped: the weights are about to change.
        """
        self._suspend(mode, keep_prefix_cache=False, on_demand=True)
        self._inside_suspended += 1
        try:
            yield
        finally:
            self._inside_suspended -= 1

    def before_optimizer_step(self, mode: KVCacheManagementMode | str | None = None) -> None:
        """The weights are about to change: like entering `suspended()`. Called by the optimizer hook."""
        self._suspend(mode, keep_prefix_cache=False, on_demand=True)

    # --- looking at it ------------------------------------------------------------------------------------------

    def metrics(self, reset: bool = True) -> dict[str, float]:
        """What happened since the last call, flat, ready for `wandb.log`; names and meaning in `rollout.metrics`."""
        self._sync_metrics()
        return self._metrics.snapshot(reset)

    def observe_logprobs(self, batch: RolloutBatch, logprobs: Tensor) -> None:
        """Record how far the trainer's log-probs are from the rollout's (metric `rollout/logprob_diff`).

        Args:
            batch: from `generate`.
            logprobs: [N, T] of the trainer, aligned like `batch.logprobs`.
        """
        if logprobs.shape != batch.logprobs.shape:
            raise ValueError(f"logprobs of shape {tuple(logprobs.shape)}: the batch's are {tuple(batch.logprobs.shape)}")
        mask = batch.response_mask.bool()
        ours = batch.logprobs[mask]
        self._metrics.observe("rollout/logprob_diff", (logprobs.detach().to(ours)[mask.to(logprobs.device)] - ours).abs())

    # --- checkpoints and the end --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight, with every version and random stream: plain data, fit for torch.save or msgpack."""
        return {
            "format": STATE_FORMAT,
            "policy_version": self.policy_version,
            "groups": [[group_id, group.size] for group_id, group in self._groups.items()],
            "finished": [
                result.serialize() for group in self._groups.values() for _, result in sorted(group.results.items())
            ],
            "unfinished": [record.serialize() for record in self.engine.snapshot()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue what `state_dict` saved. The model must hold the weights of that moment.

        Raises:
            EngineStateError: requests are in flight here already.
            SerializationError: not a state of this package, or of another format.
        """
        if self._groups or self.engine.has_unfinished:
            raise EngineStateError(f"load_state_dict() with {len(self._groups)} groups in flight: use a fresh manager")
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise SerializationError(
                f"state format {state.get('format') if isinstance(state, dict) else type(state)!r}: "
                f"this version reads format {STATE_FORMAT}"
            )
        finished = [DynamicInferenceRequest.deserialize(each) for each in state["finished"]]
        records = [DynamicInferenceRequestRecord.deserialize(each) for each in state["unfinished"]]
        self.engine.weights_updated(int(state["policy_version"]))
        self._groups = {int(group_id): _Group(int(size)) for group_id, size in state["groups"]}
        for result in finished:
            self._groups[result.request_id].results[result.sample_index] = result
        for record in records:
            self.engine.add_record(record)
        self.engine.reserve_request_ids(max(self._groups, default=-1) + 1)
        self._sync_metrics()

    def close(self) -> None:
        """End: unfinished requests are given up (with a warning), memory is given back. Harmless when repeated."""
        if self.engine.state is EngineState.STOPPED:
            return
        unfinished = sum(not group.complete for group in self._groups.values())
        if unfinished:
            warnings.warn(
                f"close() gives up {unfinished} unfinished groups; save state_dict() first to continue them later",
                stacklevel=2,
            )
        self.engine.pause()
        self.engine.stop()
        self._groups.clear()
        self._metrics.enter_phase(None)

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _run(
        self,
        done: Callable[[], bool],
        groups: Sequence[int],
        progress: bool | None,
        timeout_s: float | None,
        goal: int | None = None,
    ) -> None:
        """Step until `done`."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        self._metrics.enter_phase("generate")
        bar = tqdm(
            total=len(groups) if goal is None else goal, desc="rollout", unit="group", leave=False,
            disable=None if progress is None else not progress, delay=2.0 if progress is None else 0.0,
        )  # fmt: skip
        try:
            with bar, self.engine.installation:
                while not done():
                    if deadline is not None and self._clock() > deadline:
                        raise DeadlineError(
                            f"generate() passed timeout_s={timeout_s} with {self._open(groups)} of {len(groups)} groups "
                            "unfinished; they stay in flight: call generate([], min_groups=...) to go on"
                        )
                    self._step()
                    bar.n = min(len(groups) - self._open(groups), bar.total) if not bar.disable else 0
                    bar.set_postfix(running=self.engine.context.scheduler.num_active, refresh=False)
                    bar.update(0)
        finally:
            self._metrics.enter_phase("train")
            self._sync_metrics()

    def _open(self, groups: Sequence[int]) -> int:
        return sum(not self._groups[each].complete for each in groups if each in self._groups)

    def _step(self) -> None:
        for record in self.engine.step():
            group = self._groups.get(record.request_id)
            if group is not None:
                result = record.merge()
                group.results[result.sample_index] = result
                self._observe_result(result)
        if (step := self.engine.last_step) is not None:
            self._metrics.observe("rollout/step_requests", len(step.slots))
            self._metrics.observe("rollout/step_tokens", step.num_tokens)

    def _enough(self, wanted: int) -> bool:
        if sum(group.complete for group in self._groups.values()) < wanted:
            return False
        limit = self.config.max_staleness
        if limit is None or self.config.staleness_policy is StalenessPolicy.MASK:
            return True
        return all(group.complete or self.engine.staleness_of(each) < limit for each, group in self._groups.items())

    def _hand_out(self, group_ids: Sequence[int], on_error: Literal["raise", "mask"]) -> RolloutBatch:
        groups = [self._groups.pop(each) for each in group_ids]
        masked = self.config.staleness_policy is StalenessPolicy.MASK
        batch = RolloutBatch.from_requests(
            [result for group in groups for _, result in sorted(group.results.items())],
            policy_version=self.policy_version,
            pad_token_id=_pad_token_id(self.tokenizer),
            max_staleness=self.config.max_staleness if masked else None,
            device=self.engine.controller.layout.device,
        )
        mask = batch.response_mask.bool()
        self._metrics.observe("rollout/policy_staleness", batch.policy_staleness[mask])
        self._metrics.observe("rollout/kv_staleness", batch.kv_staleness[batch.attention_mask.bool()])
        failed = [(index, error) for index, error in enumerate(batch.errors) if error is not None]
        if failed and on_error == "raise":
            index, error = failed[0]
            raise RolloutFailedError(
                f"{len(failed)} of {len(batch)} samples failed, the first in row {index} (request "
                f"{int(batch.group_ids[index])}): {error}; the other rows are in this exception's `.batch`",
                batch,
            )
        return batch

    def _observe_result(self, result: DynamicInferenceRequest) -> None:
        if result.error is not None:
            return
        observe = self._metrics.observe
        self._metrics.add("rollout/requests_finished")
        self._metrics.add("rollout/requests_truncated", result.finish_reason is FinishReason.LENGTH)
        observe("rollout/prompt_length", result.original_prompt_length)
        observe("rollout/completion_length", len(result.completion_tokens))
        if result.ttft is not None:
            observe("rollout/ttft_s", result.ttft)
        if result.latency is not None:
            observe("rollout/request_s", result.latency)
        observe("rollout/tpot_s", result.tpot)
        admitted = [event.timestamp for event in result.events if event.type.name == "ADD_CONTEXT"]
        if admitted:
            observe("rollout/queue_s", admitted[0] - result.arrival_time)

    def _suspend(self, mode: KVCacheManagementMode | str | None, keep_prefix_cache: bool, on_demand: bool) -> MemoryMove:
        chosen = None if mode is None else KVCacheManagementMode(mode)
        if self.engine.state is EngineState.SUSPENDED:
            return MemoryMove()
        with self._metrics.phase("suspend"):
            self.engine.pause()
            try:
                move = self.engine.suspend(chosen, keep_prefix_cache=keep_prefix_cache)
            except BaseException:
                self.engine.unpause()
                raise
        self._resume_on_demand = on_demand
        self._metrics.enter_phase("train")
        self._metrics.add("rollout/suspends")
        self._metrics.add("rollout/suspend_bytes", move.bytes_copied)
        self._metrics.add("rollout/tokens_recomputed", move.tokens_given_up)
        return move

    def _ensure_running(self) -> None:
        if self._inside_suspended:
            raise EngineStateError("generating inside `with rollout.suspended():` leave the block first")
        if self._resume_on_demand:
            self.resume()
        state = self.engine.state
        if state in (EngineState.PAUSED, EngineState.SUSPENDED):
            cure = "resume()" if state is EngineState.SUSPENDED else "unpause()"
            raise EngineStateError(f"generating while {state.value}: call rollout.{cure} first")

    def _sync_metrics(self) -> None:
        stats = self.engine.stats()
        for name in _COUNTERS:
            self._metrics.add(f"rollout/{name}", stats[name] - self._counted[name])
            self._counted[name] = stats[name]
        for name in _GAUGES:
            self._metrics.set(f"rollout/{name}", stats[name])
        self._metrics.set("rollout/groups_in_flight", len(self._groups))


def _one_each(name: str, value: Any, count: int, kind: type[SamplingParams]) -> list[SamplingParams]:
    if value is None or isinstance(value, kind):
        return [value or kind()] * count
    values = list(value)
    if len(values) != count or not all(isinstance(each, kind) for each in values):
        raise ConfigError(f"{name} has {len(values)} entries for {count} prompts: pass one {kind.__name__}, or one each")
    return values


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    return 0
