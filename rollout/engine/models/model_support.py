"""Checks that an engine can serve a model exactly. If not, `UnsupportedModelError` gives the reason.

When an engine is built, a few tokens run through its model. A special attention function records the module, shapes,
arguments and mask function of every call. If the configuration names recurrent or convolutional layers, a special cache
records their states. A layer that appears in neither record, and is not known to be stateless, is rejected. The engine
supports causal attention with a sliding window, a soft cap or attention sinks. Other arguments of a layer are rejected.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules import module as torch_module

from rollout.engine.memory.kv_cache import LayerShape
from rollout.engine.memory.state_pool import StateShape
from rollout.engine.models.attention import SINKS, Arguments, Installation, carried, forward_with
from rollout.engine.models.attention_masks import PROBE, MaskFunction, OtherMask, function_of, window_of
from rollout.engine.models.recurrent_layers import RecurrentLayers
from rollout.engine.models.recurrent_states import ProbedStates
from rollout.errors import UnsupportedModelError

_log = logging.getLogger(__name__)

HONOURED = frozenset({"sliding_window", "softcap", SINKS})
"""The attention arguments that the engine implements."""
HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
     "logits_to_keep", "output_router_logits"}
)  # fmt: skip
"""The arguments of attention functions that the engine ignores, because they do not change the attention."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""The types of attention layers that the engine supports."""
PROBE_TOKENS = 4
DEFAULT_LENGTH = 2048
"""The maximum sequence length, in tokens, if neither the engine's configuration nor the model sets one."""


@dataclass(frozen=True)
class AttentionCall:
    """The parameters that one layer passes to its attention function."""

    num_heads: int
    scaling: float
    window: int | None
    """The number of last positions that a query attends to, including its own; None means all positions."""
    softcap: float | None
    sinks: bool = False


@dataclass(frozen=True)
class ModelLayout:
    """The properties of a model that the engine needs: attention layers, states, dtypes, device, vocabulary."""

    layers: tuple[LayerShape, ...]
    """The shapes of each attention layer's keys and values."""
    calls: tuple[AttentionCall, ...]
    """The attention parameters of each layer, in the order of `layers`."""
    layer_of: dict[nn.Module, int]
    """The index of each attention module in `layers`."""
    mask_windows: dict[nn.Module, int | None]
    """The windows of layers whose mask differs from the `sliding_window` that they pass; None means no window."""
    kv_dtype: torch.dtype
    narrowest_dtype: torch.dtype
    """The narrowest dtype among keys and values. Under the trainer's autocast it may differ from `kv_dtype`."""
    device: torch.device
    vocab_size: int
    max_position_embeddings: int | None
    described: str
    """A description of the architecture, used in messages and to distinguish checkpoints of different models."""
    states: tuple[StateShape, ...] = ()
    """The states of the recurrent and convolutional layers."""
    cache_argument: str = "past_key_values"
    """The name of the argument of the model's `forward` that takes the cache with the recurrent states."""

    @property
    def masks(self) -> tuple[object, ...]:
        """The attention windows of all layers. If two layouts have equal `masks`, their queries attend to the same keys."""
        return self.layer_of, self.mask_windows, [call.window for call in self.calls]


class _Call(NamedTuple):
    module: nn.Module
    shape: LayerShape
    dtype: torch.dtype
    arguments: dict[str, Any]
    asked: AttentionCall
    mask: MaskFunction | None


class _Watcher:
    """An `AttentionBatch` that records the attention calls of one forward pass."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.dtypes: set[torch.dtype] = set()
        self.lengths: set[int] = set()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, arguments: Arguments
    ) -> Tensor:
        given = arguments.get("attention_mask")
        mask = None if given is None else function_of(given)
        if mask is not None:
            del arguments["attention_mask"]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        window, softcap, sinks = (arguments.get(name) for name in ("sliding_window", "softcap", SINKS))
        asked = AttentionCall(query.shape[1], scaling, window, softcap, sinks=sinks is not None)
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        self.calls.append(_Call(module, shape, key.dtype, arguments, asked, mask))
        self.dtypes |= {key.dtype, value.dtype}
        self.lengths |= {query.shape[2], key.shape[2]}
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous()


class Examined(NamedTuple):
    """The result of `examine`: the requirements of the engine that a model does and does not meet, and its layout."""

    layout: ModelLayout | None
    """The layout of the model, or None if it does not meet all requirements."""
    present: list[str]
    """The requirements that the model meets, one line each."""
    missing: list[str]
    """The requirements that the model does not meet, one line each, which also says how to meet it."""
    cause: BaseException | None = None
    """The exception that the model's forward pass raised, if any."""


def inspect_model(model: nn.Module, max_sequence_length: int | None = None) -> ModelLayout:
    """Return the properties of a model, which must meet all requirements of the engine.

    Raises:
        UnsupportedModelError: the model does not meet some requirements; the message lists them, one per line.
    """
    found = examine(model, max_sequence_length)
    if found.layout is not None:
        return found.layout
    head = f"{type(model).__name__} lacks {len(found.missing)} things that the engine needs"
    raise UnsupportedModelError(
        found.missing[0] if len(found.missing) == 1 else "\n- ".join([head, *found.missing])
    ) from found.cause


def examine(model: nn.Module, max_sequence_length: int | None = None) -> Examined:
    """Run `PROBE_TOKENS` tokens through the model to find its attention layers and the requirements that it does not meet.

    Args:
        max_sequence_length: length of the longest sequence to serve, in tokens; None means the model's own limit.
    """
    name, present, missing = type(model).__name__, list[str](), list[str]()

    def check(title: str, wrong: Iterable[str]) -> bool:
        found = list(wrong)
        missing.extend(found)
        if not found:
            present.append(title)
        return not found

    signature = check("forward: takes position_ids, logits_to_keep and keyword arguments", _arguments_missing(model))
    if not check(f"{name}: a decoder of transformers with a configuration", _kind_missing(model)):
        return Examined(None, present, missing)
    if not check("weights: loaded, on one device", _weights_missing(model)):
        return Examined(None, present, missing)
    config: Any = model.config
    text_config = config.get_text_config()
    recurrent = RecurrentLayers.of(model, text_config)
    check("layer_types: all are known", _layers_unknown(model, text_config, recurrent))
    device = next(model.parameters()).device
    states = ProbedStates() if recurrent else None
    cache = {} if states is None else {recurrent.cache_argument: states}
    watcher, output, cause = _watch(model, device, cache) if signature else (_Watcher(), None, None)
    if cause is not None:
        missing.append(
            f"{name}: module {_innermost(model, cause)!r} does not run with the engine's arguments "
            f"({type(cause).__name__}: {cause}); the forward must take position_ids, logits_to_keep and keyword arguments "
            "that reach its attention layers, and these must go through transformers' attention interface"
        )
    elif signature:
        check("logits: of the positions that logits_to_keep names", _logits_missing(model, output))
    shapes = () if states is None else states.shapes
    whole = output is not None
    if not whole and not recurrent:
        # Run with token ids alone: although the model failed with the engine's arguments, this still checks its attention.
        watcher, whole = _watch_ids_alone(model, device)
    names = {module: name for name, module in model.named_modules()}
    if whole:
        what = f"{len(watcher.calls)} layers" + (f", and {len(shapes)} recurrent states" if shapes else "")
        title = f"attention: {what} go through transformers' interfaces"
        check(title, _attention_missing(model, text_config, watcher, names, shapes, recurrent))
    check("attention: causal, with supported arguments", _arguments_unknown(names, watcher.calls))
    positions = getattr(text_config, "max_position_embeddings", None)
    calls = [each.asked for each in watcher.calls]
    # Skip the mask check for FlashAttention, which gets no mask: the window is passed to it as an argument.
    if not str(config._attn_implementation_internal).startswith("flash"):
        length, wrong = max_sequence_length or positions or DEFAULT_LENGTH, list[str]()
        calls = _windowed(names, watcher.calls, length, device, wrong)
        check("masks: causal, in windows at most", wrong)
    if missing:
        return Examined(None, present, list(dict.fromkeys(missing)), cause)
    layout = _layout(model, watcher, calls, shapes, recurrent, positions)
    return Examined(layout, present, missing)


def _layout(
    model: nn.Module,
    watcher: _Watcher,
    calls: Sequence[AttentionCall],
    shapes: Sequence[StateShape],
    recurrent: RecurrentLayers,
    positions: int | None,
) -> ModelLayout:
    first = next(model.parameters())
    text_config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    modules = [each.module for each in watcher.calls]
    layers = {getattr(module, "layer_idx", None) for module in modules} | {each.key.layer for each in shapes}
    return ModelLayout(
        layers=tuple(each.shape for each in watcher.calls),
        calls=tuple(calls),
        layer_of={module: index for index, module in enumerate(modules)},
        mask_windows={
            each.module: call.window
            for each, call in zip(watcher.calls, calls, strict=True)
            if call.window != each.asked.window
        },
        kv_dtype=watcher.calls[0].dtype if watcher.calls else first.dtype,
        narrowest_dtype=min(watcher.dtypes or {first.dtype}, key=lambda dtype: dtype.itemsize),
        device=first.device,
        vocab_size=int(text_config.vocab_size),
        max_position_embeddings=positions,
        described=(
            f"{getattr(text_config, 'model_type', 'model')} of {len(layers) if shapes else len(modules)} layers, a width of "
            f"{getattr(text_config, 'hidden_size', None)} and {text_config.vocab_size} tokens"
        ),
        states=tuple(shapes),
        cache_argument=recurrent.cache_argument,
    )


# --- requirements that are not met ------------------------------------------------------------------------------------


def _arguments_missing(model: nn.Module) -> Iterator[str]:
    parameters = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    name = type(model).__name__
    for argument, use in (
        ("position_ids", "rotate queries and keys by these positions: several sequences share one row"),
        ("logits_to_keep", "compute logits at these positions alone: head(hidden[:, logits_to_keep])"),
    ):
        if argument not in parameters:
            yield f"{name}.forward does not take {argument}: add it, and {use}"
    yield f"{name}.forward does not take **kwargs: add it, and pass it on to every attention function"


def _kind_missing(model: nn.Module) -> Iterator[str]:
    name, config = type(model).__name__, getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation_internal"):
        yield (
            f"{name} is no Hugging Face PreTrainedModel (it has no config with an attention implementation); pass the "
            "model itself, not a wrapper, or derive the class from transformers.PreTrainedModel, with a PreTrainedConfig"
        )
    if getattr(config, "is_encoder_decoder", False):
        yield f"{name} is an encoder-decoder; the engine serves decoder-only models"
    if "diffusion" in str(getattr(config, "model_type", "")):
        yield (
            f"{name} makes whole blocks of tokens by denoising; the engine samples one token after the other, each with "
            "the log-prob that it was drawn with"
        )


def _weights_missing(model: nn.Module) -> Iterator[str]:
    name = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if name is not None:
        yield (
            f"{type(model).__name__}: {name} is on the meta device, which holds no weights; build the engine after they "
            "are loaded (from_pretrained without device_map='meta', or to_empty() and load_state_dict())"
        )
    yield from devices_of(model)


def devices_of(model: nn.Module) -> Iterator[str]:
    """Yield a message if the model's parameters are on more than one device, because the KV cache is on a single device."""
    first: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.device, name)
    if len(first) > 1:
        (one, name), (other, other_name), *_ = first.items()
        yield (
            f"{type(model).__name__} is spread over devices ({name} on {one}, {other_name} on {other}; device_map?): load "
            "it on one device, or shard it by fully_shard"
        )


def _layers_unknown(model: nn.Module, config: Any, recurrent: RecurrentLayers) -> Iterator[str]:
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES and index not in recurrent.stateful | recurrent.stateless:
            yield (
                f"{type(model).__name__} layer {index} is {kind!r}: the engine serves {', '.join(LAYER_TYPES)} layers, and "
                f"recurrent ones behind the cache of transformers 5.21 or later (this is {transformers.__version__})"
            )


def _watch(
    model: nn.Module, device: torch.device, cache: Mapping[str, ProbedStates]
) -> tuple[_Watcher, Any, BaseException | None]:
    """Run a forward pass with the same arguments as the engine's, and record its attention calls.

    Returns:
        The watcher, the output of the model (None if it raised), and the exception that the model raised (or None).
    """
    watcher = _Watcher()
    ids = torch.arange(PROBE_TOKENS, device=device)[None]
    keep = torch.tensor([PROBE_TOKENS - 1], device=device)
    with Installation(model, implementation=PROBE).forward():
        try:
            output = forward_with(watcher, model, input_ids=ids, position_ids=ids, logits_to_keep=keep, **cache)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, ValueError, RuntimeError, LookupError, AssertionError) as exc:
            return watcher, None, exc
    return watcher, output, None


def _watch_ids_alone(model: nn.Module, device: torch.device) -> tuple[_Watcher, bool]:
    """Run a forward pass with token ids as the only argument. Return the watcher, and whether the pass completed."""
    watcher, done = _Watcher(), False
    with Installation(model, implementation=PROBE).forward(), carried(watcher), suppress(Exception):
        model(input_ids=torch.arange(PROBE_TOKENS, device=device)[None])
        done = True
    return watcher, done


def _logits_missing(model: nn.Module, output: Any) -> Iterator[str]:
    logits = getattr(output, "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[1] != 1:
        shown = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
        yield (
            f"{type(model).__name__} gives {shown} where the last token's logits [1, 1, vocabulary] are wanted: it must "
            "be a causal language model with its head, as AutoModelForCausalLM.from_pretrained loads it, that honours "
            "logits_to_keep"
        )


def _attention_missing(
    model: nn.Module,
    config: Any,
    watcher: _Watcher,
    names: dict[nn.Module, str],
    states: Sequence[StateShape],
    recurrent: RecurrentLayers,
) -> Iterator[str]:
    modules, name = [each.module for each in watcher.calls], type(model).__name__
    seen = set(modules)
    if twice := next((module for module in modules if modules.count(module) > 1), None):
        yield f"{name}: attention layer {names[twice]!r} runs twice in one forward; the engine keeps one KV per layer"
    if watcher.lengths - {PROBE_TOKENS}:
        yield (
            f"{name}: attention gets {max(watcher.lengths)} positions for {PROBE_TOKENS} tokens, so the model prepends "
            "positions (prompt tuning, prefix tuning); use an adapter inside the layers, such as LoRA"
        )
    if states:
        yield from recurrent.missing(model, seen, states)
        return
    expected = getattr(config, "num_hidden_layers", None)
    if not modules or (expected is not None and len(seen) != expected):
        yield (
            f"{name}: {len(seen)} of {expected} layers go through transformers' attention interface "
            f"(first seen: {names[modules[0]] if modules else 'none'!r}); layers that compute attention themselves "
            "(nn.TransformerEncoderLayer) or keep other state are not supported: call "
            "ALL_ATTENTION_FUNCTIONS.get_interface() in them"
        )


def _arguments_unknown(names: Mapping[nn.Module, str], calls: Iterable[_Call]) -> Iterator[str]:
    for call in calls:
        name, arguments, num_heads = names[call.module], call.arguments, call.asked.num_heads
        if not getattr(call.module, "is_causal", True) or arguments.get("is_causal") is False:
            yield f"attention layer {name!r} is bidirectional (is_causal=False); only causal is served"
        for argument, value in arguments.items():
            if argument == SINKS and isinstance(value, Tensor) and value.shape != (num_heads,):
                yield (
                    f"attention layer {name!r} passes {SINKS} of shape {tuple(value.shape)}; the engine serves one "
                    f"attention sink per query head, [{num_heads}]"
                )
            if argument in HONOURED | HARMLESS | {"is_causal"} or value is None or value is False:
                continue
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            yield f"attention layer {name!r} passes {argument}={shown}, which the engine cannot honour"


def _windowed(
    names: Mapping[nn.Module, str], calls: Sequence[_Call], length: int, device: torch.device, wrong: list[str]
) -> list[AttentionCall]:
    """Return each call's parameters with the window that applies: the mask's or, without a mask, the layer's own argument.

    A message is appended to `wrong` for each mask that is neither causal nor a causal window.
    """
    known: dict[MaskFunction, int | None] = {}
    windowed = []
    for each in calls:
        mask, asked = each.mask, each.asked
        if mask is not None and mask not in known:
            try:
                known[mask] = window_of(mask, length, device)
            except OtherMask as exc:
                known[mask] = asked.window
                wrong.append(
                    f"attention layer {names[each.module]!r}: {exc}; the engine serves causal attention, also in a window"
                )
        window = asked.window if mask is None else known[mask]
        # Treat a window of at least `length` tokens as no window, because no sequence is longer than `length`.
        same = (asked.window or length) >= length and (window or length) >= length
        windowed.append(replace(asked, window=asked.window if same else window))
    return windowed


def has_global_hooks() -> bool:
    """Return whether torch has global forward hooks, which a fused forward pass would not run."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _innermost(model: nn.Module, exc: BaseException) -> str:
    names = {module: name for name, module in model.named_modules()}
    found, trace = type(model).__name__, exc.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            found = names.get(module) or found
        trace = trace.tb_next
    return found


def check_lengths(model: nn.Module, max_sequence_length: int) -> None:
    """Check that the model's position encoding supports sequences of this length.

    - Some rotary variants re-encode all positions once a sequence is longer than the original context, so cached keys
      would become wrong.
    - A model without rotary positions has a position table of fixed length.
    - Other models only get less accurate, which is logged as a warning.

    Raises:
        UnsupportedModelError: the keys of such sequences would be wrong, or positions would be missing.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    parameters = getattr(config, "rope_parameters", None) or {}
    rows = getattr(config, "max_position_embeddings", None)
    if not parameters and rows is not None and max_sequence_length > rows:
        raise UnsupportedModelError(
            f"{type(model).__name__} has max_position_embeddings={rows} and no rotary positions, and "
            f"max_sequence_length={max_sequence_length}; set InferenceConfig.max_sequence_length <= {rows}"
        )
    if rows is not None and max_sequence_length > rows:
        _log.warning(
            "max_sequence_length=%d and %s has max_position_embeddings=%d: beyond these its tokens are worse than it was "
            "trained for; set InferenceConfig.max_sequence_length <= %d unless you mean it",
            max_sequence_length, type(model).__name__, rows, rows,
        )  # fmt: skip
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if each.get("rope_type") not in ("dynamic", "longrope"):
            continue
        original = each.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_sequence_length > original:
            raise UnsupportedModelError(
                f"rope_type={each['rope_type']!r} changes every position once a sequence passes {original} tokens, "
                f"and max_sequence_length={max_sequence_length}; set InferenceConfig.max_sequence_length <= {original}"
            )
