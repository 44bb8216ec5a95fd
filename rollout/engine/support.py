"""`rollout.inspect`: everything that the engine needs of a model, and whether the model has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.models.model_support import examine
from rollout.errors import UnsupportedModelError


@dataclass(frozen=True)
class Support:
    """Things that the engine needs of a model. `str()`: a line each; `bool()`: nothing is missing."""

    present: tuple[str, ...]
    missing: tuple[str, ...]
    """The reasons for which construction raises, each with its cure."""

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return "\n".join(
            [*(f"present  {each}" for each in self.present), *(f"MISSING  {each}" for each in self.missing)]
        )


def inspect(model: nn.Module, config: InferenceConfig | None = None) -> Support:
    """List what the engine needs of a model, as present or missing, without stopping at the first obstacle.

    If nothing is missing, an engine with a small KV cache is built, whose forward in chunks is compared with the model's
    own. On several ranks that share the weights every rank calls it.

    Args:
        model: the model, as `RolloutManager` takes it.
        config: options of the engine. None: defaults.
    """
    config = config or InferenceConfig(kv_cache_memory_gb=0.05)
    found = examine(model, config.max_sequence_length)
    present, missing = found.present, found.missing
    if not missing:
        try:
            forward = DynamicInferenceEngine(model, None, config).explain().model
        except UnsupportedModelError as exc:
            missing = [str(exc)]
        else:
            runs = "fused" if forward.fused else f"the module's own, because {forward.why_not_fused or 'it is sharded'}"
            present = [*present, "numbers: a forward in chunks equals the model's own", f"served by: {runs}"]
    return Support(tuple(present), tuple(missing))
