"""`with exact(model):` makes the trainer's forward pass use the engine's arithmetic.

The `forward` of the model instance is replaced, and restored at the end of the block. The model must pass the same checks as
for the engine's C++ forward pass: known classes, original functions, no hooks. If not, `UnsupportedModelError` is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from rollout.engine.fused.fused_binding import Bound
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.model_support import ModelLayout, inspect_model
from rollout.engine.models.originals import Unfusable, bypassed
from rollout.engine.training.decoder import logits_of
from rollout.engine.training.operations import library
from rollout.engine.training.packing import packing_of
from rollout.engine.weights.source import weights_of
from rollout.errors import UnsupportedModelError


def why_not_exact(model: nn.Module, layout: ModelLayout, cache: KVCache) -> str | None:
    """Return the reason why exact mode does not support a model in its current state, or None if it does."""
    try:
        library()
        _bound(model, layout, cache)
    except (UnsupportedModelError, Unfusable, AttributeError) as exc:
        return str(exc)
    return bypassed(layout.device)


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Make `model(...)` inside the block compute the same logits, bit for bit, as an engine in exact mode.

    A token's logits depend only on the weights, the token and the tokens before it, not on padding, the batch or the number
    of threads. Torch computes the gradients of the same function. Logits at padding are 0. The arguments `input_ids`,
    `attention_mask` and `logits_to_keep` (a number, or column indices) mean the same as in transformers. Positions count
    from each row's first real token.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 causal language model on a CPU, in float32 or bfloat16; DDP may wrap it.

    Raises:
        UnsupportedModelError: exact mode does not support the model or an argument; the message names it. This may be raised
            on entering the block or by `model(...)`.
    """
    source = weights_of(model)
    trained = source.trained
    if source.collective:
        raise UnsupportedModelError(
            f"exact: the weights of {type(trained).__name__} are spread over the ranks (FSDP, ZeRO-3); exact mode serves "
            "whole weights (one rank, or DDP)"
        )
    if isinstance(vars(trained).get("forward"), _ExactForward):
        yield
        return
    forward = _ExactForward(trained)
    try:
        trained.forward = forward
        yield
    finally:
        vars(trained).pop("forward", None)


class _ExactForward:
    """The exact-mode replacement for the `forward` of one causal language model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        device = next(model.parameters()).device
        if device.type != "cpu":
            raise UnsupportedModelError(f"exact mode runs on a CPU, and the model is on {device}")
        library()
        layout = inspect_model(model)
        # Create a KV cache with room for one token: the checks of the C++ forward pass require a cache.
        self._verified = layout, KVCache(layout.layers, 1, 1, layout.kv_dtype, layout.device)
        self._verify()

    @torch.compiler.disable  # type: ignore[untyped-decorator] # fused operations would round differently
    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits that the model's own `forward` would return, up to rounding, without using a KV cache."""
        if others.pop("return_dict", None) is False:
            others["return_dict=False"] = True
        refused = [name for name, value in others.items() if value is not None and value is not False]
        if refused or input_ids is None:
            raise UnsupportedModelError(
                f"exact: forward({', '.join(refused) or 'without input_ids'}): it takes input_ids [B, T], attention_mask, "
                "and logits_to_keep; leave `with rollout.exact(model)` for anything else"
            )
        self._verify()
        packing = packing_of(input_ids, attention_mask)
        return CausalLMOutputWithPast(logits=logits_of(self._model, self._windows, input_ids, packing, logits_to_keep))

    def _verify(self) -> None:
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        if "forward" in vars(head):
            raise UnsupportedModelError(
                "exact: log-probs are read off a head whose forward was replaced (batch.logprobs_of); exact mode computes "
                "whole logits: take model(batch.input_ids, attention_mask=batch.attention_mask).logits"
            )
        if (why := bypassed(next(self._model.parameters()).device)) is not None:
            raise UnsupportedModelError(f"exact: {why}, which exact mode does not serve")
        self._bind()
        if self._model.training and any(layer.self_attn.attention_dropout for layer in self._layers):
            raise UnsupportedModelError(
                "exact: attention_dropout is not 0 and the model is in training mode: a rollout drops nothing; set it to 0"
            )

    def _bind(self) -> None:
        model, layout = self._model, self._verified[0]
        installed = vars(model).pop("forward", None) if isinstance(vars(model).get("forward"), _ExactForward) else None
        try:
            layers = _bound(model, *self._verified).causal_lm.model.layers
        except (Unfusable, AttributeError) as exc:
            raise UnsupportedModelError(
                f"exact: {type(model).__name__}: {exc}; exact mode serves what the C++ forward serves"
            ) from exc
        finally:
            if installed is not None:
                model.forward = installed
        self._layers = list(layers)
        self._windows = [layout.calls[layout.layer_of[layer.self_attn]].window for layer in self._layers]


def _bound(model: nn.Module, layout: ModelLayout, cache: KVCache) -> Bound:
    bound = Bound(model, layout, cache, exact=True)
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise Unfusable("it holds PEFT adapters")
    return bound
