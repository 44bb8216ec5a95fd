"""llama.cpp behind JSON lines, one sequence at a time: runs in an interpreter of its own, started by `remote.py`.

The weights are written as GGUF from the folder the race has saved, in the same number format. Keys and values are float16,
which is llama.cpp's default.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from serve import serve

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

engine: Any = None
rng = np.random.default_rng(0)


def convert(folder: str) -> dict[str, Any]:
    """Write `model.gguf` beside the weights, unless it is there."""
    path = Path(folder) / "model.gguf"
    if path.exists():
        return {}
    config = json.loads((path.parent / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weights, bfloat16 in tensors(path.parent / "model.safetensors"):
        # Vectors are float32 in every GGUF file.
        if bfloat16 and weights.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {}


def tensors(path: Path) -> list[tuple[str, Any, bool]]:
    """Name, float32 values and whether they were bfloat16, of every tensor in a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = []
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        low, high = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] not in ("F32", "BF16"):
            raise ValueError(f"{name}: weights of type {entry['dtype']}; F32 or BF16 can be converted")
        bfloat16 = entry["dtype"] == "BF16"
        if bfloat16:
            values = (np.frombuffer(data[low:high], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[low:high], "<f4")
        found.append((name, values.reshape(entry["shape"]), bfloat16))
    return found


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`."""
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{LAYER_NAMES['.'.join(parts[2:-1])]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]] + ".weight"


def load(folder: str, threads: int, longest: int) -> dict[str, Any]:
    """Open the GGUF file; versions."""
    global engine
    engine = llama_cpp.Llama(
        str(Path(folder) / "model.gguf"), n_ctx=longest, n_batch=512, n_threads=threads, n_threads_batch=threads,
        verbose=False,
    )  # fmt: skip
    return {"versions": {"llama-cpp-python": llama_cpp.__version__, "gguf": gguf_version()}}


def gguf_version() -> str:
    """Version of the gguf package."""
    from importlib.metadata import version

    return version("gguf")


def generate(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Seconds of prompt and forced tokens at temperature 1, each with its log-prob."""
    (prompt,), (length,) = prompts, lengths
    completion: list[int] = []
    logprobs: list[float] = []
    start = time.perf_counter()
    engine.reset()
    pending = prompt
    while len(completion) < length:
        engine.eval(pending)
        token, logprob = draw(np.ctypeslib.as_array(llama_cpp.llama_get_logits(engine.ctx), shape=(engine.n_vocab(),)))
        completion.append(token)
        logprobs.append(logprob)
        pending = [token]
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "completions": [completion], "logprobs": len(logprobs)}


def draw(logits: Any) -> tuple[int, float]:
    """A token at temperature 1 and its log-prob: the softmax is summed up once for both."""
    weights = np.exp(logits - logits.max())
    sums = weights.cumsum(dtype=np.float64)
    token = min(int(sums.searchsorted(rng.random() * sums[-1], side="right")), len(sums) - 1)
    return token, float(np.log(weights[token] / sums[-1]))


def forget() -> dict[str, Any]:
    """Nothing: every prompt begins with an empty cache."""
    return {}


if __name__ == "__main__":
    serve({"convert": convert, "load": load, "generate": generate, "forget": forget})
