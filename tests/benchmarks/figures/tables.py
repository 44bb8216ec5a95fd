"""Renders stored results as Markdown tables; each function takes what one benchmark wrote with `--json`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PEERS = {
    "ours": "ours",
    "generate": "`model.generate`",
    "cb": "`generate_batch`",
    "vllm": "vLLM (CPU)",
    "llama.cpp": "llama.cpp",
}
README_ROWS = {
    ("steady", "16 sequences", "decode"): "decode, 16 sequences",
    ("grpo", "8 × 8 samples", "all tokens"): "GRPO: 8 prompts of 512 × 8 samples, long tail",
    ("prefix", "64 questions", "all tokens"): "64 questions after one prompt of 1,024 tokens",
}
README_PEERS = ("ours", "generate", "vllm")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float) -> str:
    """Three digits that matter, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


# --- the race ---------------------------------------------------------------------------------------------------------


def race(found: Mapping[str, Any]) -> str:
    """Tokens per second by workload and peer, ours over the peer's in brackets, and our share of the floor."""
    rows = [row for row in found["rows"] if row["peers"].get("ours", {}).get("median") or row["unit"] == "s"]
    peers = [peer for peer in PEERS if any(peer in row["peers"] for row in rows)]
    return table(
        ["workload", *(PEERS[peer] for peer in peers), "of the floor"],
        [[_label(row), *(_against(row, peer) for peer in peers), _floor(row)] for row in rows],
    )


def readme(found: Mapping[str, Any]) -> str:
    """Three workloads of the race."""
    rows = {(row["workload"], row["case"], row["metric"]): row for row in found["rows"]}
    return table(
        ["workload", *(PEERS[peer] for peer in README_PEERS)],
        [[label, *(_against(rows[key], peer, "×") for peer in README_PEERS)] for key, label in README_ROWS.items()],
    )


def bookkeeping(found: Mapping[str, Any]) -> str:
    """Where a decode step goes."""
    steps = [profile for profile in found["profiles"] if profile["kind"] == "decode step"]
    names = list(dict.fromkeys(name for step in steps for name in step["ms"]))
    return table(
        ["a decode step, ms", *names, "Python and bookkeeping"],
        [
            [
                f"{step['sequences']} sequence{'s' * (step['sequences'] > 1)}",
                *(f"{step['ms'].get(name, 0):.2f}" for name in names),
                f"{step['bookkeeping_share']:.1%}",
            ]
            for step in steps
        ],
    )


def _label(row: Mapping[str, Any]) -> str:
    metric = {"seconds": "s", "all tokens": "with prefill"}.get(row["metric"], row["metric"])
    return f"{row['workload']}, {row['case']}: {metric}"


def _against(row: Mapping[str, Any], peer: str, times: str = "") -> str:
    """Median, and how many times the peer's figure ours is."""
    cell = row["peers"].get(peer)
    if cell is None or cell["median"] is None:
        return "" if cell is None else "not run"
    if peer == row["reference"]:
        return number(cell["median"])
    ratio = row["ratios"][peer]
    better = ratio if row["higher_is_better"] else 1 / ratio
    digits = 2 if better < 2 else 1 if better < 10 else 0
    return f"{number(cell['median'])} ({better:.{digits}f}{times})"


def _floor(row: Mapping[str, Any]) -> str:
    reached = row["peers"].get("ours", {}).get("of_floor")
    return "" if reached is None else f"{reached:.0%}"


FAMILIES = {
    "llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma 2", "gemma3": "Gemma 3", "olmo2": "OLMo 2", "olmo3": "OLMo 3",
    "phi3": "Phi-3", "glm": "GLM", "glm4": "GLM-4", "qwen3_moe": "Qwen3-MoE, 2 of 8 experts",
    "mixtral": "Mixtral, 2 of 8 experts", "qwen3_5": "Qwen3.5", "qwen3_next": "Qwen3-Next, 2 of 8 experts",
    "gpt2": "GPT-2", "llama, lora": "Llama with live LoRA, r = 16 everywhere",
}  # fmt: skip


def families(found: Mapping[str, Any]) -> str:
    """Tokens per second by family and peer, with the prompts and of the decode alone, and ours of the floor where it was
    measured; without peers that did not run."""
    rows = {(row["workload"], row["metric"]): row for row in found["rows"]}
    ran = {name for row in rows.values() for name, cell in row["peers"].items() if cell["median"] is not None}
    columns = [(metric, peer) for metric in ("all tokens", "decode") for peer in PEERS if peer in ran]
    bounded = ["all tokens", "decode"] if any(row["floor"] for row in rows.values()) else []
    return table(
        [
            "",
            *(metric if peer == "ours" else PEERS[peer] for metric, peer in columns),
            *(f"{metric}: of the floor" for metric in bounded),
        ],
        [
            [
                FAMILIES[family],
                *(_against(rows[family, metric], peer) for metric, peer in columns),
                *(_floor(rows[family, metric]) for metric in bounded),
            ]
            for family in dict.fromkeys(family for family, _ in rows)
        ],
    )


def trl_step(found: Mapping[str, Any]) -> str:
    """Seconds of a whole step of GRPOTrainer, and of it to ours."""
    rows = found["rows"]
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    return table(
        ["a step", *peers],
        [[row["case"], *(_against(row, peer) for peer in peers)] for row in rows],
    )


# --- coordinator and server -------------------------------------------------------------------------------------------


def coordinator(found: Mapping[str, Any]) -> str:
    """Latency, throughput and the core's time."""
    latency, core = found["latency"], found["core"]
    rows = [
        [
            "added to a round trip, median, ms", f"{latency['ours']['added_us'] / 1e3:.2f}",
            f"the same three hops of raw ZMQ {latency['floor']['added_us'] / 1e3:.2f}, a client that polls "
            f"{latency['polled']['added_us'] / 1e3:.1f}",
        ]
    ]  # fmt: skip
    for name, load in found["throughput"].items():
        unit = "samples" if load["ours"]["samples_per_s"] > 1.5 * load["ours"]["requests_per_s"] else "requests"
        ours, floor = (load[kind][f"{unit}_per_s"] for kind in ("ours", "floor"))
        rows.append([f"{name}: {unit} per second", number(ours), f"raw ZMQ {number(floor)}"])
    for row in core:
        tokens, samples, _ = row["load"]
        ranks = " / ".join(f"{int(each):,}" for each in row["us"])
        rows.append(
            [f"core alone, µs per request of {tokens:,} tokens × {samples}, {ranks} ranks",
             " / ".join(f"{us:.0f}" for us in row["us"].values()), ""]
        )  # fmt: skip
    return table(["", "ours", "beside"], rows)


def hostile(found: Mapping[str, Any]) -> str:
    """Waits beside each attack."""
    return table(
        ["attack", "status query, worst", "request, p99", "request, worst", "the coordinator's peak, MB"],
        [
            [kind, *(f"{row[name]:.0f}" for name in ("probe_ms_worst", "ms_p99", "ms_worst", "peak_mb"))]
            for kind, row in found["hostile"].items()
        ],
    )


def long_tail(found: Mapping[str, Any]) -> str:
    """Total time over the lower bound and over foreseen lengths."""
    over = found["long_tail"]["over"]
    labels = {
        "one_queue_s": "one queue, any free slot", "ours_s": "ours", "told_s": "ours, longest first by an earlier epoch",
        "static_s": "a static split",
    }  # fmt: skip
    return table(
        ["schedule", "of the lower bound", "of a scheduler that knows every length"],
        [
            [label, *(f"{over[name][key]:.2f}" for name in ("bound_s", "foreseen_s"))]
            for key, label in labels.items()
            if key in over["bound_s"]
        ],
    )


def serving(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """HTTP beside the same streams and `generate`: tokens per second, and processor time of server and client per token."""
    medians = {peer: [_middle(column) for column in zip(*rounds, strict=True)] for peer, rounds in found.items()}
    labels = {"generate": "`generate`", "stream": "streams in the process", "http": "streams over HTTP"}
    return table(
        ["64 streams of 256 tokens", "tokens/s", "of `generate`", "of the streams", "µs of CPU per token"],
        [
            [labels[peer], number(rate), *(f"{rate / medians[other][0]:.2f}" for other in ("generate", "stream")),
             number(work)]
            for peer, (rate, work) in medians.items()
        ],
    )  # fmt: skip


def fair_share(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Waits beside a greedy client."""
    return table(
        ["beside", "which takes, s", "one-token completion: median", "longest", "`/health`, longest"],
        [
            [load, f"{_middle(each['took']):.1f}", f"{_middle(each['completion']):.3f}", f"{max(each['completion']):.2f}",
             f"{max(each['health']):.2f}"]
            for load, each in found.items()
        ],
    )  # fmt: skip


# --- the engine and training ------------------------------------------------------------------------------------------


def busy(found: Mapping[str, Sequence[float]]) -> str:
    """Tokens per second beside busy processes, and the share of the quiet speed."""
    cells = {tuple(key.split("|")): _middle(values) for key, values in found.items()}
    peers = list(dict.fromkeys(peer for _, peer in cells))
    loads = list(dict.fromkeys(load for load, _ in cells))
    return table(
        ["", *(PEERS[peer] for peer in peers)],
        [
            [
                load,
                *(f"{number(cells[load, peer])} ({cells[load, peer] / cells[loads[0], peer]:.2f})" for peer in peers),
            ]
            for load in loads
        ],
    )


def tree(found: Mapping[str, Any]) -> str:
    """Training on a batch of groups, by method."""
    labels = {"padded": "padded, sorted by length, sdpa", "packed": "packed, nothing shared", "tree": "trees"}
    methods = [method for method in found if isinstance(found[method], Mapping) and "train seconds" in found[method]]
    first = found[methods[0]]
    return table(
        ["", "tokens", "training, s", "whole step, s", "peak memory, GiB"],
        [
            [labels.get(method, method), number(found[method]["tokens"]),
             *(f"{found[method][part]:.1f} ({first[part] / found[method][part]:.1f})"
               for part in ("train seconds", "step seconds")),
             f"{found[method]['peak MiB'] / 1024:.1f}"]
            for method in methods
        ],
    )  # fmt: skip


def speculation(found: Mapping[str, Mapping[str, float]]) -> str:
    """Plain over speculative seconds, by workload."""
    return table(
        ["workload", "plain / speculative", "of its tail", "accepted per draft"],
        [
            [
                name,
                f"{each['ratio']:.2f}",
                f"{each['tail']:.1f}" if name.startswith("grpo") else "",
                f"{each['accepted']:.1f}",
            ]
            for name, each in found.items()
        ],
    )


def score(found: Mapping[str, Any]) -> str:
    """Log-probs of given sequences."""
    medians = {name: _middle(values) for name, values in found["seconds"].items()}
    labels = {
        "padded, as it comes": "padded forward, rows as they come",
        "padded, sorted": "padded forward, rows sorted by length",
        "score": "`manager.score`, nothing in the prefix cache",
    }
    rows = [[labels[name], f"{value:.1f}", f"{value / medians['score']:.1f}"] for name, value in medians.items()]
    return table(["", "seconds", "times the engine's"], rows)


def suspend(found: Mapping[str, Any]) -> str:
    """Suspend and resume beside plain copies and prefilling again."""
    offload, recompute = found["medians"]["offload"], found["medians"]["recompute"]
    gigabytes = offload["bytes"] / 1e9
    return table(
        [
            f"{found['requests']} requests of {found['tokens']:,} tokens, {gigabytes:.2f} GB of KV",
            "ms",
            "plain copy over it",
        ],
        [
            ["suspend", number(1e3 * offload["suspend_s"]), f"{found['suspend_of_plain']:.2f}"],
            ["resume", number(1e3 * offload["resume_s"]), f"{found['resume_of_plain']:.2f}"],
            ["until all decode again, resumed", number(1e3 * offload["back_s"]), ""],
            ["until all decode again, prefilled", number(1e3 * recompute["back_s"]), ""],
        ],
    )


def exact(found: Mapping[str, Any]) -> str:
    """Exact beside plain."""
    differs = found["differs"]
    rows = [
        [work, *(f"{_middle(each[mode]):.2f}" for mode in ("plain", "exact")),
         f"{_middle(each['exact']) / _middle(each['plain']):.2f}"]
        for work, each in found["seconds"].items()
    ]  # fmt: skip
    rows.append(["largest difference of log-probs", f"{differs['plain']:.2g}", f"{differs['exact']:.2g}", ""])
    return table(["", "plain, s", "exact, s", "exact / plain"], rows)


def episodes(found: Sequence[Mapping[str, float]]) -> str:
    """Episodes against turns in lock step."""
    medians = {name: _middle([each[name] for each in found]) for name in found[0]}
    return table(
        ["256 episodes of 8 turns, tools of 0 to 2 s", ""],
        [
            [
                "tokens per second, those of lock step = 1: a fixed set",
                f"{medians['lock_step_s'] / medians['run_s']:.2f}",
            ],
            ["the same, ended episodes replaced", f"{medians['steady_ratio']:.2f}"],
            ["engine busy while it has work", f"{medians['busy']:.0%}"],
            ["tokens of earlier turns computed again", f"{medians['recomputed']:.1%}"],
        ],
    )


def weights(found: Mapping[str, float]) -> str:
    """Fingerprints of an update beside a training step."""
    return table(
        ["fingerprints", "ms per update", "of a training step"],
        [[name, f"{1e3 * found[name]:.2f}", f"{found[name] / found['step']:.2%}"] for name in ("sampled", "full")],
    )


def kept_tokens(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A step with kept tokens over one without, by how sampling is truncated."""
    return table(
        ["", "ids per token", "processor time", "wall time"],
        [
            [name, f"{each['ids']:.0f}", *(f"{_middle(each[kind]):.3f}" for kind in ("CPU", "wall"))]
            for name, each in found.items()
        ],
    )


def tracing(found: Mapping[str, float]) -> str:
    """The recorder."""
    return table(
        ["", "share"],
        [
            ["of a step: recording, its own time", f"{found['recorder_share_on']:.3%}"],
            ["of a step: not recording", f"{found['recorder_share_off']:.5%}"],
        ],
    )


def journal(found: Mapping[str, Mapping[str, float]]) -> str:
    """The journal beside sqlite."""
    return table(
        ["", "append, µs", "groups lost by one flipped bit: mean", "worst"],
        [
            [name, f"{each['append_us']:.0f}", f"{each['lost_mean']:.2f}", f"{each['lost_worst']:.0f}"]
            for name, each in found.items()
        ],
    )
