"""Startup peer in a fresh process: this engine or `model.generate`, asked for one token by `startup.py`."""

from __future__ import annotations

from typing import Any

from serve import serve


def first_token(who: str, folder: str, prompt: list[int], device: str) -> dict[str, Any]:
    """Load the model from `folder` and sample one token, by `ours` or by `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(device)
    if who == "ours":
        from rollout import InferenceConfig, RolloutManager, SamplingParams

        rollout = RolloutManager(model, None, InferenceConfig(kv_cache_memory_gb=1))
        batch = rollout.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
        return {"completions": [batch.input_ids[0, len(prompt) :].tolist()]}
    ids = torch.tensor([prompt], device=device)
    output = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=1, pad_token_id=0)
    return {"completions": [output[0, len(prompt) :].tolist()]}


if __name__ == "__main__":
    serve({"first_token": first_token})
