"""Policy of the examples: a small Qwen3 model, its character tokenizer, supervised warm-up and evaluation."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import torch
from arithmetic import ALPHABET, Problem, Problems, reward
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout import RolloutManager, SamplingParams

SPECIAL = ("<pad>", "<bos>", "<eos>")


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `ALPHABET`; <bos> comes before every text."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="right"
    )


def small_model(tokenizer: PreTrainedTokenizerFast, *, max_length: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.4 million random parameters, for sequences of up to `max_length` tokens, on the best device."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Problems,
    *,
    until: float,
    rise: int = 20,
    fall: int = 30,
    max_steps: int = 300,
    batch_size: int = 64,
) -> int:
    """Teach the model a little, from solved problems: enough to be right now and then, which is what GRPO needs.

    Args:
        until: end when the running mean of the loss (nats per token of the solutions) has come below this; how many
            steps that takes differs from seed to seed, how good the model then is differs little.
        rise: steps over which the learning rate rises.
        fall: steps over which it falls to zero, after `until` is reached.
        max_steps: most steps before the fall.
        batch_size: problems per step.

    Returns:
        The number of steps.
    """
    optimizer = AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95))
    step, left, running = 0, fall, float("inf")
    while left:
        step += 1
        left -= running < until or step > max_steps or left < fall
        optimizer.param_groups[0]["lr"] = 3e-3 * min(step / rise, left / fall)
        loss = _lesson_loss(model, tokenizer, problems.sample(batch_size))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = 0.8 * min(running, 3.0) + 0.2 * loss.item()
    return step


def _lesson_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> Tensor:
    texts = [problem.prompt + problem.solution + tokenizer.eos_token for problem in problems]
    lesson = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    prompt_lengths = torch.tensor(list(map(len, prompts)), device=model.device)
    position = torch.arange(lesson["input_ids"].shape[1], device=model.device)
    taught = (position >= prompt_lengths[:, None]) & lesson["attention_mask"].bool()
    return model(**lesson, labels=lesson["input_ids"].masked_fill(~taught, -100)).loss


def trapezoid(optimizer: Optimizer, steps: int, *, rise: int, fall: float) -> LambdaLR:
    """Learning rate: up over the first `rise` steps, level, down to zero over the last share `fall` of all `steps`."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise, (steps - step) / (fall * steps)))


def add_truncation(parser: ArgumentParser) -> None:
    """Add the flags of truncated sampling, which `truncation` reads."""
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens that weigh this much"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: from all")


def truncation(options: Namespace) -> dict[str, Any]:
    """Sampling parameters of the flags: truncated, the loss needs the set that every token was drawn from."""
    truncated = options.top_p < 1 or options.top_k > 0
    return {"top_p": options.top_p, "top_k": options.top_k, "return_kept_tokens": truncated}


def exact_match(
    manager: RolloutManager, problems: Sequence[Problem], *, max_tokens: int, greedy: bool = False
) -> float:
    """Share of the problems solved by one completion each. Resets the metrics."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0 if greedy else 1.0)
    batch = manager.generate([problem.prompt for problem in problems], params, progress=False)
    manager.metrics()
    return sum(map(reward, batch.texts, (problem.answer for problem in problems))) / len(problems)
