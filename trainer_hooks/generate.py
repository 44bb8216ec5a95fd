"""A hook that runs the token loop of transformers' `model.generate` on the rollout's engine, for any trainer or loop.

    hook = attach(model, manager)       model.generate(...) samples with `manager`, until hook.detach()

`generate` itself still runs, so transformers handles configuration, checks, logits processors and stopping criteria. Only
the token loop at its end is replaced, and only for the attached module: a deep copy of it keeps transformers' loop. Calls
that the engine does not support also run that loop (see `generate_options`), with one warning per reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from rollout import (
    ConfigError,
    EngineStateError,
    FinishReason,
    InvalidRequestError,
    RolloutBatch,
    RolloutManager,
    SamplingParams,
    WeightsChangedError,
)
from rollout.engine.models.attention import in_eval_mode
from rollout.errors import warn_caller
from trainer_hooks.generate_options import NotServed, check_arguments, sampling_params
from trainer_hooks.generate_prompts import Pixels, Row, grouped, rows_of
from trainer_hooks.trl_forward import own_forward

Fallback = Literal["warn", "raise"]

_HOOKS: WeakKeyDictionary[nn.Module, GenerateHook] = WeakKeyDictionary()
"""The hook of each attached module. Modules are compared by identity, so a copy of a module has no hook."""
_OTHER_LOOPS = {"_beam_search": "beam search", "_assisted_decoding": "assisted decoding"}


@dataclass(frozen=True)
class Sampled:
    """The rows of one `generate` call that ran on the engine.

    Attributes:
        prompts, completions: token ids of each row, without padding.
        logprobs: log-prob of each completion token under softmax(logits / temperature), without truncation or penalties.
        temperature: divisor of the logits. 0 is greedy decoding, whose log-probs are at temperature 1.
        version: policy version that sampled the completions.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float]]
    temperature: float
    version: int


class GenerateHook:
    """A hook that runs `model.generate` on the engine until `detach()` or the end of a `with` block. Created by `attach`.

    Attributes:
        model: the module whose `generate` runs on the engine.
        manager: the manager that samples.
        served: number of calls that the engine has served.
        fallbacks: dict from a reason to the number of calls that ran transformers' loop for this reason.
        last: the rows of the last served call. None if no call has been served.
    """

    def __init__(self, model: nn.Module, manager: RolloutManager, fallback: Fallback) -> None:
        self.model = model
        self.manager = manager
        self.served = 0
        self.fallbacks: Counter[str] = Counter()
        self.last: Sampled | None = None
        self._fallback = fallback
        self._most = manager.engine.context.scheduler.num_places
        self._changes = _Changes(model, manager)
        self._undo = ExitStack()
        self._undo.callback(self._changes.detach)
        _wrap(type(model))
        _HOOKS[model] = self
        self._undo.callback(_unwrap, type(model))
        self._undo.callback(_HOOKS.pop, model, None)

    def detach(self) -> None:
        """Restore the model's own generation loop. Idempotent."""
        self._undo.close()

    def __enter__(self) -> GenerateHook:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # --- internals ----------------------------------------------------------------------------------------------

    def sample(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: object,
        given: dict[str, Any],
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate on the engine. This replaces transformers' `_sample`, and has its arguments and result.

        Raises:
            NotServed: transformers' loop has to run; the message says why.
        """
        check_arguments(config, streamer, given)
        rows = rows_of(self.model, input_ids, given, config.num_return_sequences or 1)
        padding = torch.tensor([input_ids.shape[1] - len(row.tokens) for row in rows], device=input_ids.device)
        vocab = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        params, stop = sampling_params(config, processors, criteria, input_ids.shape[1], padding, vocab)
        wants_logits = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        if wants_logits and rows[0].images is not None:
            raise NotServed("output_scores or output_logits with images")
        try:
            completions, logprobs = self._complete(input_ids, rows, params, stop, config)
        except (InvalidRequestError, EngineStateError) as error:
            raise NotServed(f"{type(error).__name__}: {error}") from None
        finally:
            # Free the KV cache: a trainer continues with its own forward pass and needs the memory.
            self.manager.before_optimizer_step()
        self.served += 1
        self.last = Sampled(
            [row.tokens for row in rows], completions, logprobs, params.temperature, self.manager.policy_version
        )
        sequences = _padded(input_ids, completions, config)
        if not config.return_dict_in_generate:
            return sequences
        output = GenerateDecoderOnlyOutput(sequences=sequences)
        if wants_logits:
            logits = self._logits(sequences, input_ids.shape[1], given)
            if config.output_logits:
                output.logits = tuple(each.clone() for each in logits)
            if config.output_scores:
                start = input_ids.shape[1]
                output.scores = tuple(processors(sequences[:, : start + i], each) for i, each in enumerate(logits))
        return output

    def _complete(
        self,
        input_ids: Tensor,
        rows: list[Row],
        params: SamplingParams,
        stop: StopStringCriteria | None,
        config: GenerationConfig,
    ) -> tuple[list[list[int]], list[list[float]]]:
        if stop is None:
            return self._generate(rows, [params] * len(rows))
        # Let transformers' criterion decide where a row ends, because it also checks the prompt and special tokens. The
        # engine's stop strings only save tokens after that end. A row that the engine stops too early is continued.
        completions: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        stops = () if self.manager.tokenizer is None else tuple(stop.stop_strings)
        going = list(range(len(rows)))
        while going:
            left = [params.max_tokens - len(completions[row]) for row in going]
            each = [
                params.replace(stop=stops, max_tokens=most, min_tokens=min(most, max(0, params.min_tokens - done)))
                for most in left
                for done in [params.max_tokens - most]
            ]
            more, found = self._generate([rows[row].continued(completions[row]) for row in going], each)
            for row, tokens, values in zip(going, more, found, strict=True):
                completions[row] += tokens
                logprobs[row] += values
            ended = _cut(input_ids, completions, logprobs, stop, config)
            ids = params.stop_token_ids
            going = [
                row
                for row in going
                if not ended[row] and completions[row][-1] not in ids and len(completions[row]) < params.max_tokens
            ]
        return completions, logprobs

    def _generate(self, rows: list[Row], params: list[SamplingParams]) -> tuple[list[list[int]], list[list[float]]]:
        most = self._most
        prompts, each, owners = [], [], []
        for numbers in grouped(rows, params):
            row, chosen = rows[numbers[0]], params[numbers[0]]
            # Generate one completion for all greedy rows of a prompt, because their completions would be identical.
            parts = [numbers] if chosen.greedy else [numbers[i : i + most] for i in range(0, len(numbers), most)]
            for part in parts:
                prompts.append(row.prompt)
                owners.append(part)
                seeded = {} if chosen.greedy else {"n": len(part), "seed": int(torch.randint(2**63 - 1, ()))}
                each.append(chosen.replace(**seeded))
        batch = iter(self._batch(prompts, each))
        completions: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        for part, chosen in zip(owners, each, strict=True):
            requests = [next(batch) for _ in range(chosen.n)] * (len(part) if chosen.greedy else 1)
            for number, request in zip(part, requests, strict=True):
                completions[number] = list(request.generated_tokens)
                if len(completions[number]) < chosen.max_tokens and request.finish_reason == FinishReason.LENGTH:
                    raise NotServed("rows longer than the engine's max_sequence_length")
                logprobs[number] = list(request.generated_log_probs or ())
        return completions, logprobs

    def _batch(self, prompts: list[Any], params: list[SamplingParams]) -> RolloutBatch:
        self._changes.announce()
        try:
            with own_forward(self.model):
                try:
                    return self.manager.generate(prompts, params, progress=False)
                except WeightsChangedError:
                    # Announce the update and try again. Some writes to weights, such as loading, do not raise tensors'
                    # version counters, so `_changes` misses them and only the weight fingerprints detect them.
                    self.manager.weights_updated()
                    return self.manager.generate(prompts, params, progress=False)
        finally:
            self._changes.note()

    def _logits(self, sequences: Tensor, width: int, given: Mapping[str, Any]) -> list[Tensor]:
        """Return the logits [N, V] of every position after the first `width`, from one forward pass over `sequences`."""
        model: Any = self.model
        mask = given.get("attention_mask")
        mask = torch.ones_like(sequences) if mask is None else mask
        mask = torch.cat([mask, mask.new_ones(len(mask), sequences.shape[1] - mask.shape[1])], dim=1)[:, :-1]
        count = sequences.shape[1] - width
        options: dict[str, Any] = {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
        if model._supports_logits_to_keep():
            options["logits_to_keep"] = count
        with in_eval_mode(model.modules()), torch.no_grad():
            logits = model(input_ids=sequences[:, :-1], use_cache=False, **options).logits[:, -count:]
        return list(logits.to(sequences.device, torch.float32).unbind(1))

    def fall_back(self, reason: str) -> None:
        """Count a call that the engine does not support, and warn the first time that its `reason` occurs.

        Raises:
            ConfigError: `fallback` is "raise".
        """
        # Count by the part of the message before the colon. The rest may contain numbers that differ from call to call,
        # so every call would look like a new reason and issue another warning.
        kind = reason.partition(":")[0]
        if self._fallback == "raise":
            raise ConfigError(
                f"model.generate: the engine does not serve {reason}; leave it out, or attach(..., fallback='warn') to run "
                "transformers' own loop"
            )
        self.fallbacks[kind] += 1
        if self.fallbacks[kind] == 1:
            warn_caller(
                f"model.generate runs transformers' own loop, because the engine does not serve {reason}; this warning is "
                "shown once (attach(..., fallback='raise') makes it an error)",
                through=("transformers", "torch"),
            )


def attach(model: nn.Module, manager: RolloutManager, *, fallback: Fallback = "warn") -> GenerateHook:
    """Let `model.generate(...)` sample with `manager`'s engine, until `detach()`.

    Requires: `manager` was built from `model`, or from the Hugging Face model inside its wrapper (PEFT, DDP, torch.compile).

    The engine serves greedy decoding and sampling with temperature, top-k, top-p, min-p, repetition penalty, minimum
    lengths, suppressed tokens, end-of-sequence ids, stop strings, left padding, images, `num_return_sequences`, and
    `return_dict_in_generate` with `scores` and `logits`. Other calls run transformers' loop. `use_cache` and
    `cache_implementation` have no effect, the output's `past_key_values` is None, and dropout is off even in training mode.

    Greedy tokens equal transformers'. Sampled tokens have the same distribution. Their seeds are drawn from torch's CPU
    generator, so `torch.manual_seed` and the generator state in the trainer's checkpoint make runs repeatable. Equal prompts
    in a batch are computed once. When `generate` returns, the KV cache has left the device. Every rank must call `generate`.

    Weight updates need no announcement: the next call raises the policy version after a step of any torch optimizer over
    the model's parameters, or an in-place change that torch counts. `Advanced.weight_fingerprints` detects other changes.

    Args:
        model: the model, or its wrapper.
        manager: the manager that samples with the model's weights.
        fallback: what to do if the engine does not support a call. With "warn", run transformers' own loop, with one
            warning per reason and a count in `fallbacks`. With "raise", raise `ConfigError`.

    Raises:
        ConfigError: `fallback` is neither "warn" nor "raise".
        TypeError: the model has no transformers `generate`, or the model's class replaces the loop.
        ValueError: `manager` samples with another model, or the model is already attached.
    """
    if fallback not in ("warn", "raise"):
        raise ConfigError(f"fallback={fallback!r}: must be 'warn' or 'raise'")
    sampled = manager.model
    # Search inside wrappers: a PeftModel's generate() calls the wrapped model's generate().
    target: Any = next((module for module in sampled.modules() if isinstance(module, GenerationMixin)), None)
    if target is None:
        raise TypeError(f"{type(sampled).__name__} has no generate() of transformers to serve: use manager.generate")
    if not any(module is target for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} does not contain the {type(target).__name__} that samples: build the manager of "
            "it, RolloutManager(model, tokenizer)"
        )
    own = type(target)._sample
    if own is not GenerationMixin._sample and not hasattr(own, "serves"):
        raise TypeError(f"{type(target).__name__} has its own sampling loop, which the engine cannot replace")
    if target in _HOOKS:
        raise ValueError("this model is attached already: keep that hook, or detach() it first")
    return GenerateHook(target, manager, fallback)


class _Changes:
    """A detector of changes to a model's weights.

    It compares version counters of tensors. It also records optimizer steps, because fused optimizers raise no counters.
    """

    def __init__(self, model: nn.Module, manager: RolloutManager) -> None:
        self._model = model
        self._manager = manager
        self._known: tuple[int, list[tuple[int, int]]] | None = None
        self._stepped = False
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def detach(self) -> None:
        self._handle.remove()

    def announce(self) -> None:
        """Raise the policy version if weights have changed since the last `note()`, unless it has already been raised."""
        if self._known is None:
            return
        version, state = self._known
        if self._manager.policy_version == version and (self._stepped or state != self._state()):
            self._manager.weights_updated()

    def note(self) -> None:
        """Record the current policy version, and the addresses and version counters of the weights."""
        self._known = self._manager.policy_version, self._state()
        self._stepped = False

    def _state(self) -> list[tuple[int, int]]:
        """Return (address, version counter) for each parameter. The address is 0 if the data is a subclass of `Tensor`."""
        return [
            (parameter.data_ptr() if type(parameter.data) is Tensor else 0, parameter._version)
            for parameter in self._model.parameters()
            if not parameter.is_inference()
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        self._stepped |= any(
            parameter.grad is not None and id(parameter) in own
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


def _wrap(of_class: Any) -> None:
    """Wrap a model class's generation loops, so that modules with a hook call it. Do nothing if already wrapped."""
    if hasattr(of_class._sample, "serves"):
        return
    own_sample = of_class._sample
    own_images: Any = getattr(of_class, "_prepare_multimodal_encoder_kwargs_for_generation", None)  # None before 5.18

    @wraps(own_sample)
    def sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **given: Any,
    ) -> Any:
        hook = _HOOKS.get(self)
        if hook is not None:
            try:
                return hook.sample(input_ids, logits_processor, stopping_criteria, generation_config, streamer, given)
            except NotServed as reason:
                hook.fall_back(str(reason))
        return own_sample(
            self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **given
        )

    @wraps(own_images)
    def prepare_images(self: Any, model_kwargs: dict[str, Any]) -> Any:
        before = dict(model_kwargs)
        after = own_images(self, model_kwargs)
        if self in _HOOKS:
            after["mm_encoder_outputs"] = Pixels(after["mm_encoder_outputs"], before.keys() - after.keys(), before)
        return after

    sample.serves = True  # type: ignore[attr-defined]
    of_class._sample = sample
    of_class._prepare_multimodal_encoder_kwargs_for_generation = prepare_images
    for name, reason in _OTHER_LOOPS.items():
        setattr(of_class, name, _counted(getattr(of_class, name), reason))


def _counted(loop: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Wrap an unsupported generation loop: if the module has a hook, each call is reported to it with `reason`."""

    @wraps(loop)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (hook := _HOOKS.get(self)) is not None:
            hook.fall_back(reason)
        return loop(self, *args, **kwargs)

    return counted


def _unwrap(model_class: type) -> None:
    """Restore the original generation loops of a model class, unless a module of the class still has a hook."""
    if any(isinstance(module, model_class) for module in _HOOKS):
        return
    for name in ("_sample", "_prepare_multimodal_encoder_kwargs_for_generation", *_OTHER_LOOPS):
        if name in vars(model_class):
            delattr(model_class, name)


def _cut(
    input_ids: Tensor,
    completions: list[list[int]],
    logprobs: list[list[float]],
    stop: StopStringCriteria,
    config: GenerationConfig,
) -> list[bool]:
    """Cut rows in place after the token that completes a stop string. Return, for each row, whether it has one."""
    sequences = _padded(input_ids, completions, config)
    width, ended = input_ids.shape[1], [False] * len(completions)
    for length in range(1, sequences.shape[1] - width + 1):
        for row, found in enumerate(stop(sequences[:, : width + length], None).tolist()):
            if found and not ended[row] and length <= len(completions[row]):
                ended[row] = True
                del completions[row][length:], logprobs[row][length:]
    return ended


def _padded(input_ids: Tensor, completions: list[list[int]], config: GenerationConfig) -> Tensor:
    """Return `input_ids` [N, T] with the completions appended. Shorter completions are padded on the right."""
    longest = max(map(len, completions))
    pad = getattr(config, "_pad_token_tensor", None)
    new = input_ids.new_full((len(completions), longest), 0 if pad is None else int(pad))
    for row, completion in zip(new, completions, strict=True):
        row[: len(completion)] = torch.tensor(completion, dtype=new.dtype)
    return torch.cat([input_ids, new], dim=1)
