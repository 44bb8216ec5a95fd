"""Markdown tables of what benchmarks found: for the terminal, the README and `docs/explanation/performance.md`.

Each takes what one benchmark writes with `--json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.common import number

Found = Any
"""The results that a benchmark has written."""

PEERS = {
    "ours": "ours", "generate": "`model.generate`", "cb": "`generate_batch`", "vllm": "vLLM (CPU)",
    "openvino": "OpenVINO GenAI",
}  # fmt: skip
README_ROWS = {
    ("steady", "16 sequences", "decode"): "decode, 16 sequences",
    ("grpo", "8 × 8 samples", "all tokens"): "GRPO: 8 prompts of 512 × 8 samples, long tail",
    ("prefix", "64 questions", "all tokens"): "64 questions after one prompt of 1,024 tokens",
}
FAMILIES = {
    "llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma 2", "gemma3": "Gemma 3", "olmo2": "OLMo 2", "olmo3": "OLMo 3",
    "phi3": "Phi-3", "glm": "GLM", "glm4": "GLM-4", "qwen3_moe": "Qwen3-MoE, 2 of 8 experts",
    "mixtral": "Mixtral, 2 of 8 experts", "qwen3_5": "Qwen3.5", "qwen3_next": "Qwen3-Next, 2 of 8 experts",
    "gpt2": "GPT-2", "llama, lora": "Llama with live LoRA, r = 16 everywhere",
}  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _against(row: Found, peer: str, times: str = "") -> str:
    """Median, and how many times the peer's figure ours is."""
    cell = row["peers"].get(peer)
    if cell is None or cell["median"] is None:
        return "" if cell is None else "not run"
    ratio = row["ratios"].get(peer)
    if peer == "ours" or ratio is None:
        return number(cell["median"])
    digits = 2 if ratio < 2 else 1 if ratio < 10 else 0
    return f"{number(cell['median'])} ({ratio:.{digits}f}{times})"


def problems(found: Found) -> list[str]:
    """Why peers of a race did not run or failed, each reason once."""
    every = ((row["size"], peer, cell["problem"]) for row in found["rows"] for peer, cell in row["peers"].items())
    return list(dict.fromkeys(f"{size}, {peer}: {problem}" for size, peer, problem in every if problem is not None))


def _size(name: str) -> str:
    return f"{name[:-1]} {name[-1].upper()}"


def _model(row: Found, rows: Sequence[Found]) -> str:
    """The row's model, unless all rows have the same."""
    several = len({(each["size"], each["dtype"]) for each in rows}) > 1
    return f"{_size(row['size'])} {row['dtype']}, " if several else ""


def _floor(row: Found) -> str:
    reached = row["peers"].get("ours", {}).get("of_floor")
    return "" if reached is None else f"{reached:.0%}"


def race(found: Found) -> str:
    """Tokens per second by model, workload and peer, ours over the peer's in brackets, and our share of the floor."""
    rows = found["rows"]
    peers = [peer for peer in PEERS if any(peer in row["peers"] for row in rows)]
    metrics = {"all tokens": "with prefill", "decode": "decode"}
    return table(
        ["workload", *(PEERS[peer] for peer in peers), "of the floor"],
        [[f"{_model(row, rows)}{row['workload']}, {row['case']}: {metrics[row['metric']]}",
          *(_against(row, peer) for peer in peers), _floor(row)] for row in rows],
    )  # fmt: skip


def readme(found: Found) -> str:
    """Three workloads of the race."""
    rows = {(row["workload"], row["case"], row["metric"]): row for row in found["rows"]}
    peers = ["ours", "generate", "vllm"]
    return table(
        ["workload", *(PEERS[peer] for peer in peers)],
        [[label, *(_against(rows[key], peer, "×") for peer in peers)] for key, label in README_ROWS.items()],
    )


def bookkeeping(found: Found) -> str:
    """Return a table of the time of a decode step by part, and of scheduling alone."""
    steps = [profile for profile in found["profiles"] if profile["kind"] == "decode step"]
    names = list(dict.fromkeys(name for step in steps for name in step["ms"]))
    rows = [
        [f"{_model(step, steps)}{step['sequences']} sequence{'s' * (step['sequences'] > 1)}",
         *(f"{step['ms'].get(name, 0):.2f}" for name in names), f"{step['bookkeeping_share']:.1%}"] for step in steps
    ]  # fmt: skip
    alone = [
        f"\n\nScheduling {profile['requests']:,} running requests without a model takes {profile['step_ms']:.2f} ms."
        for profile in found["profiles"] if profile["kind"] == "scheduling"
    ]  # fmt: skip
    return table(["a decode step, ms", *names, "Python and bookkeeping"], rows) + "".join(alone)


def families(found: Found) -> str:
    """Tokens per second by family and peer that ran, with the prompts and of the decode alone, and ours of the floor."""
    rows = {(row["workload"], row["metric"]): row for row in found["rows"]}
    ran = {name for row in rows.values() for name, cell in row["peers"].items() if cell["median"] is not None}
    metrics = ("all tokens", "decode")
    columns = [(metric, peer) for metric in metrics for peer in PEERS if peer in ran]
    return table(
        ["", *(metric if peer == "ours" else PEERS[peer] for metric, peer in columns),
         *(f"{metric}: of the floor" for metric in metrics)],
        [[FAMILIES[family], *(_against(rows[family, metric], peer) for metric, peer in columns),
          *(_floor(rows[family, metric]) for metric in metrics)] for family in dict.fromkeys(name for name, _ in rows)],
    )  # fmt: skip


def trl_step(found: Found) -> str:
    """A whole step of GRPOTrainer: seconds (and how many times ours), seconds of its sampling, and peak memory."""
    labels = {"ours": "engine", "trees": "engine, trained over prefix trees", "generate": PEERS["generate"],
              "cb": "transformers' continuous batching"}  # fmt: skip
    rows = []
    for peer in next(iter(found.values())):
        rows.append([labels[peer]])
        for peers in found.values():
            each, first = peers[peer], next(iter(peers.values()))
            ratio = each["seconds"] / first["seconds"]
            rows[-1] += [f"{number(each['seconds'])} ({ratio:.2f})", number(each["sampling"]), number(each["MB"])]
    models = (f"{_size(size)} {dtype}" for size, dtype in (model.split("-") for model in found))
    return table(["", *(f"{model}: {figure}" for model in models for figure in ("s", "of it sampling", "MB"))], rows)


def busy(found: Found) -> str:
    """Tokens per second beside busy processes, and the share of the quiet speed."""
    cells = {tuple(key.split("|")): statistics.median(values) for key, values in found.items()}
    loads, peers = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    return table(
        ["", *(PEERS[peer] for peer in peers)],
        [[load, *(f"{number(cells[load, peer])} ({cells[load, peer] / cells[loads[0], peer]:.2f})" for peer in peers)]
         for load in loads],
    )  # fmt: skip


def tree(found: Found) -> str:
    """Training on a batch of groups, by method."""
    labels = {"padded": "padded, sorted by length, sdpa", "packed": "packed, nothing shared", "tree": "trees"}
    first = found["padded"]["train seconds"]
    return table(
        ["", "tokens", "training, s", "peak memory, GiB"],
        [[label, number(each["tokens"]), f"{each['train seconds']:.1f} ({first / each['train seconds']:.1f})",
          f"{each['peak MiB'] / 1024:.1f}"] for method, label in labels.items() for each in [found[method]]],
    )  # fmt: skip


def training_memory(found: Found) -> str:
    """Peak memory by method, with whole logits and without."""
    methods = {"trl": "TRL's fused head, padded", "padded": "padded", "packed": "packed", "tree": "tree"}

    def cell(peaks: Found, method: str) -> str:
        if method not in peaks:
            return ""
        return "above 10,000" if peaks[method] is None else number(peaks[method]["MB"])

    return table(
        ["MB, at a vocabulary of", *(f"{each['vocabulary']:,}, {each['tokens']:,} tokens{kind}" for each in found
                                     for kind in (": whole", ": tiles"))],
        [[label, *(cell(each["peaks"], name) for each in found for name in (f"{method}, whole", method))]
         for method, label in methods.items()],
    )  # fmt: skip


def forked(found: Found) -> str:
    """Histories that drop earlier thinking: every turn as a row, and the tree of all."""
    return table(
        ["turns", "tokens: rows", "tree", "seconds: rows", "tree", "MB: rows one by one", "tree"],
        [[str(each["turns"]), *(f"{each['timed'][kind]:,}" for kind in ("rows", "tree")),
          *(number(each["timed"]["seconds"][kind]) for kind in ("rows", "tree")),
          *(number(each["peaks"][kind]["MB"]) for kind in ("rows", "tree"))] for each in found],
    )  # fmt: skip


def search(found: Found) -> str:
    """A long agent whose last turn has 8 branches."""
    (peaks,) = (each["peaks"] for each in found)
    one = peaks["one path"]
    rows = {
        "one row, its last turn trained": one,
        "8 rows one by one, at least": {"seconds": 8 * one["seconds"], "MB": one["MB"]},
        "tree in one forward": peaks["tree"],
        "`batch.paths`": peaks["paths"],
    }
    return table(
        ["", "seconds (of one row)", "MB (of one row)"],
        [[label, *(f"{number(each[unit])} ({each[unit] / one[unit]:.2f})" for unit in ("seconds", "MB"))]
         for label, each in rows.items()],
    )  # fmt: skip


def suspend(found: Found) -> str:
    """Suspend and resume beside plain copies and prefilling again."""
    offload, recompute = found["medians"]["offload"], found["medians"]["recompute"]
    head = f"{found['requests']} requests of {found['tokens']:,} tokens, {offload['bytes'] / 1e9:.2f} GB of KV"
    return table(
        [head, "ms", "plain copy over it"],
        [
            ["suspend", number(1e3 * offload["suspend_s"]), f"{found['suspend_of_plain']:.2f}"],
            ["resume", number(1e3 * offload["resume_s"]), f"{found['resume_of_plain']:.2f}"],
            ["until all decode again, resumed", number(1e3 * offload["back_s"]), ""],
            ["until all decode again, prefilled", number(1e3 * recompute["back_s"]), ""],
        ],
    )


def exact(found: Found) -> str:
    """Exact beside plain."""
    rows = []
    for work, each in found["seconds"].items():
        plain, ours = (statistics.median(each[mode]) for mode in ("plain", "exact"))
        rows.append([work, f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}"])
    differs = [f"{found['differs'][mode]:.2g}" for mode in ("plain", "exact")]
    return table(
        ["", "plain, s", "exact, s", "exact / plain"], [*rows, ["largest difference of log-probs", *differs, ""]]
    )


def equivalence(found: Found) -> str:
    """Reward at the end and seconds of a step, by what sampled."""
    rows = []
    for variant, runs in found["runs"].items():
        ends = [run["reward"][-max(1, len(run["reward"]) // 4) :] for run in runs]
        seconds = statistics.median(second for run in runs for second in run["seconds"])
        low, high = found["intervals"][variant]
        verdict = "" if variant == "generate" else "yes" if found["equivalent"][variant] else "not shown"
        rows.append([f"`{variant}`", f"{statistics.mean(map(statistics.mean, ends)):.3f}", f"{low:+.3f} to {high:+.3f}",
                     verdict, f"{seconds:.3f}"])  # fmt: skip
    head = ["sampled by", "reward, last quarter", "difference, 90 %", f"within ±{found['bound']}", "s per step"]
    return table(head, rows)


def episodes(found: Found) -> str:
    """Episodes against turns in lock step."""
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    ratio = medians["lock_step_s"] / medians["run_s"]
    return table(
        ["256 episodes of 8 turns, tools of 0 to 2 s", ""],
        [
            ["tokens per second, those of lock step = 1: a fixed set", f"{ratio:.2f}"],
            ["the same, ended episodes replaced", f"{medians['steady_ratio']:.2f}"],
            ["engine busy while it has work", f"{medians['busy']:.0%}"],
            ["tokens of earlier turns computed again", f"{medians['recomputed']:.1%}"],
        ],
    )
