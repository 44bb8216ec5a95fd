"""New tokens per second beside `model.generate`, and where a decode step's time goes.

    python -m tests.benchmarks.throughput --sequences 1 16 64 --prompt 256 --new 256

Same random model, same prompts, same number of forced tokens; rounds alternate, medians are reported, and ratios are what
to quote. Keep the machine quiet: a second busy process costs OpenMP programs far more than half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams

SIZES: dict[str, dict[str, int]] = {
    "10m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192},
    "100m": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768},
}  # fmt: skip


def make_model(size: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[size], max_position_embeddings=4096, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make_engine(model: PreTrainedModel, prompts: list[list[int]], new: int) -> DynamicInferenceEngine:
    blocks = sum(-(-(len(prompt) + new) // 16) for prompt in prompts) + len(prompts)
    return DynamicInferenceEngine(
        model, None, InferenceConfig(kv_cache_blocks=blocks, max_requests=max(64, len(prompts)), verify_model=False)
    )


def ours(model: PreTrainedModel, prompts: list[list[int]], new: int) -> float:
    engine = make_engine(model, prompts, new)
    params = SamplingParams(max_tokens=new, ignore_eos=True, seed=1)
    return seconds(lambda: engine.generate(prompts, params))


def generate(model: PreTrainedModel, prompts: list[list[int]], new: int) -> float:
    ids = torch.tensor(prompts)
    with torch.no_grad():
        return seconds(
            lambda: model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0
            )
        )


def floor_ms(model: PreTrainedModel, sequences: int, context: int) -> dict[str, float]:
    """Milliseconds a decode step cannot beat here: bytes of weights and KV over measured memory bandwidth, and
    multiplications over the measured rate of a large matrix product."""
    config, dtype = model.config, model.dtype
    buffer = torch.ones(2**26, dtype=torch.float32)
    buffer.sum()
    bandwidth = buffer.nbytes / min(seconds(buffer.sum) for _ in range(5))
    square = torch.randn(2048, 2048).to(dtype)
    square @ square
    rate = 2 * 2048**3 / min(seconds(lambda: square @ square) for _ in range(3))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context * sequences
    weights_s = max(parameters * dtype.itemsize / bandwidth, 2 * parameters * sequences / rate)
    return {
        "bandwidth_GB_s": bandwidth / 1e9,
        "matmul_GFLOP_s": rate / 1e9,
        "step_ms": 1e3 * (weights_s + kv * dtype.itemsize / bandwidth),
    }


def step_profile(model: PreTrainedModel, prompts: list[list[int]], new: int) -> dict[str, float]:
    """Milliseconds per decode step in the middle of the completion, by kind of work."""
    engine = make_engine(model, prompts, new)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    scheduler = engine.context.scheduler
    with engine.installation:
        while scheduler.waiting or scheduler.prefilling or not scheduler.decoding:
            engine.step()
        for _ in range(new // 2 - 2):
            engine.step()
        steps = 8
        total = statistics.median(seconds(engine.step) for _ in range(steps)) * 1e3
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            for _ in range(steps):
                engine.step()
    kinds = {"matmul": ("aten::mm", "aten::addmm", "mkldnn"), "gather": ("aten::index_select",),
             "attention": ("attention", "aten::bmm")}  # fmt: skip
    spent = dict.fromkeys(kinds, 0.0)
    other = 0.0
    for event in trace.key_averages():
        kind = next((kind for kind, names in kinds.items() if any(name in event.key for name in names)), None)
        if kind is None:
            other += event.self_cpu_time_total
        else:
            spent[kind] += event.self_cpu_time_total
    per_step = {kind: value / steps / 1e3 for kind, value in spent.items()} | {"other torch ops": other / steps / 1e3}
    # What the profiler does not see as a torch op: the decode kernel, and Python.
    return {"step": total, **per_step, "decode kernel and Python": max(0.0, total - sum(per_step.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--size", choices=sorted(SIZES), default="100m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--new", type=int, default=256, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    model = make_model(options.size, getattr(torch, options.dtype))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console = Console()
    console.print(
        f"{parameters / 1e6:.0f} M parameters, {options.dtype}, {options.prompt} + {options.new} tokens, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    rows = []
    for count in options.sequences:
        prompts = torch.randint(0, model.config.vocab_size, (count, options.prompt)).tolist()
        times: dict[str, list[float]] = {"ours": [], "generate": []}
        for _ in range(options.rounds):
            times["ours"].append(ours(model, prompts, options.new))
            times["generate"].append(generate(model, prompts, options.new))
        rate = {name: count * options.new / statistics.median(values) for name, values in times.items()}
        spread = {name: (max(values) - min(values)) / statistics.median(values) for name, values in times.items()}
        step = step_profile(model, prompts, options.new)
        floor = floor_ms(model, count, options.prompt + options.new // 2)
        rows.append({"sequences": count, "tokens_per_second": rate, "spread": spread,
                     "ratio": rate["ours"] / rate["generate"], "step_ms": step, "floor": floor})  # fmt: skip
        console.print(
            f"{count:>3} sequences: ours {rate['ours']:.1f} tok/s (spread {spread['ours']:.0%}), generate "
            f"{rate['generate']:.1f} tok/s (spread {spread['generate']:.0%}), ratio {rate['ours'] / rate['generate']:.2f}"
        )
    table = Table("sequences", *rows[0]["step_ms"], "floor", "of floor", title="a decode step, ms")
    for row in rows:
        share = row["floor"]["step_ms"] / row["step_ms"]["step"]
        table.add_row(
            str(row["sequences"]), *(f"{value:.1f}" for value in row["step_ms"].values()),
            f"{row['floor']['step_ms']:.1f}", f"{share:.0%}",
        )  # fmt: skip
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
