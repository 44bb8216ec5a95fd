"""Random lives of an engine with a real model: whatever happened to it, every completion is the trainer's.

Replay one failing seed: ROLLOUT_LIFE_SEED=1234 pytest tests/engine/test_random_lives.py
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.kv_cache import zeros
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.record import DynamicInferenceRequestRecord
from rollout.request import DynamicInferenceRequest
from rollout.state import FinishReason
from tests.engines import Key, at_random, expected, make_engine, shared_model, token_ids
from tests.models import trainer_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

LIVES = int(os.environ.get("ROLLOUT_LIVES", "24"))


class Life:
    """One seed's requests, and everything that can happen to them but a change of the weights."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.name = pick(["qwen3", "gemma3", "gemma2", "gpt2", "qwen3_moe"])
        self.options: dict[str, Any] = {
            "kv_cache_blocks": pick([14, 20, 40, 100]), "max_requests": pick([2, 4, 6]), "seed": seed,
            "block_size_tokens": pick([2, 4, 5]), "max_tokens_per_step": pick([6, 11, 40]), "max_sequence_length": 60,
            "enable_prefix_caching": pick([True, True, True, False]),
            "prefix_caching_eviction_policy": pick(["lru", "lru", "ref_zero"]),
        }  # fmt: skip
        self.room = 10**9
        self.engine = self.new_engine()
        self.stems = [token_ids(20, stem) for stem in range(3)]
        self.wanted: dict[Key, Any] = {}
        self.aborted: set[Key] = set()
        self.done: dict[Key, DynamicInferenceRequest] = {}

    def new_engine(self) -> DynamicInferenceEngine:
        return make_engine(self.name, allocate=self.allocate, **self.options)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if numel > self.room:
            raise torch.OutOfMemoryError("taken")
        return zeros(numel, dtype, device)

    def add(self) -> None:
        stem = self.random.choice(self.stems)
        prompt = stem[: self.random.randint(1, 18)] + token_ids(
            self.random.choice([0, 0, 1, 4]), self.random.randrange(99)
        )
        pick = self.random.choice
        params = at_random(
            self.random.randint(0, 12), temperature=pick([0, 0, 1.0]), seed=self.random.randrange(5), n=pick([1, 1, 2, 3]),
            prompt_logprobs=pick([None, None, 0]), logprobs=pick([None, 2]), stop_token_ids=[self.random.randrange(97)],
        )  # fmt: skip
        try:
            number = self.engine.add_request(prompt, params, priority=pick([0, 0, 0, 1]))
        except InvalidRequestError:
            return
        self.wanted |= {(number, index): params for index in range(params.n)}

    def take(self, records: list[DynamicInferenceRequestRecord]) -> None:
        for record in records:
            key = (record.request_id, record.sample_index)
            assert key not in self.done, f"{key} ended twice"
            self.done[key] = record.merge()

    def step(self) -> None:
        if self.engine.has_unfinished:
            self.take(self.engine.step())

    def abort(self) -> None:
        if alive := sorted(set(self.wanted) - set(self.done)):
            number, index = self.random.choice(alive)
            self.engine.abort_request(number, self.random.choice([None, index]))

    def suspend(self) -> None:
        self.engine.pause()
        mode = self.random.choice(["persist", "offload", "offload", "recompute"])
        self.engine.suspend(mode, keep_prefix_cache=self.random.random() < 0.5)
        for event in self.random.sample([self.add, self.abort, self.update], self.random.randrange(3)):
            event()
        if self.random.random() < 0.4:
            share = self.random.uniform(0.1, 1.0)
            self.room = int(share * self.options["kv_cache_blocks"] * self.engine.cache.block_bytes / 4)
        try:
            self.engine.resume()
        except EngineStateError:
            self.room = 10**9
            self.engine.resume()
        self.room = 10**9
        self.engine.unpause()

    def move(self) -> None:
        """To another engine, with blocks of another size."""
        self.take(self.engine.take_ended())
        version, records = self.engine.policy_version, self.engine.snapshot()
        self.options["block_size_tokens"] = self.random.choice([2, 4, 5])
        self.options["kv_cache_blocks"] = max(self.options["kv_cache_blocks"], 35)
        number = self.engine.next_request_id
        self.engine = self.new_engine()
        self.engine.weights_updated(version)
        self.engine.reserve_request_ids(number)
        for record in records:
            self.engine.add_record(record)

    def interrupt(self) -> None:
        def press(*_: Any) -> None:
            raise KeyboardInterrupt

        layer = next(module for name, module in shared_model(self.name).named_modules() if name.endswith(".1"))
        handle = layer.register_forward_pre_hook(press)
        try:
            self.step()
        except KeyboardInterrupt:
            pass
        finally:
            handle.remove()

    def live(self, events: int = 40) -> None:
        actions = [self.add, self.step, self.abort, self.suspend, self.update, self.move, self.interrupt]
        for _ in range(events):
            self.random.choices(actions, [6, 22, 1, 2, 2, 1, 1])[0]()
            self.engine.context.scheduler.check()
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.step()
        self.engine.context.scheduler.check()
        assert set(self.done) == set(self.wanted), "a request was lost"
        assert self.engine.context.allocator.num_used == 0, "a block leaked"
        for key, request in self.done.items():
            self.check(key, request)

    def update(self) -> None:
        self.engine.weights_updated()

    def check(self, key: Key, request: DynamicInferenceRequest) -> None:
        params, made = self.wanted[key], request.generated_tokens
        tokens = request.prompt_tokens + made
        reference = trainer_logprobs(shared_model(self.name), tokens)
        assert np.allclose(request.generated_log_probs, reference[len(request.prompt_tokens) - 1 :], atol=1e-5)
        if params.greedy:
            assert made == expected(self.name, request.prompt_tokens, max(12, len(made)))[: len(made)]
        if params.logprobs:
            pairs = zip(request.generated_top_n_logprobs, request.generated_log_probs, strict=True)
            assert all(len(top) == 2 and top[0][1] >= logprob - 1e-6 for top, logprob in pairs)
        if request.finish_reason is not FinishReason.ABORT:
            stopped = bool(made) and made[-1] in params.stop_token_ids
            assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(made) == params.max_tokens
            assert not set(made[:-1]) & set(params.stop_token_ids)
            if params.prompt_logprobs is not None:
                assert np.allclose(request.prompt_log_probs, reference[: len(request.prompt_tokens) - 1], atol=1e-5)
        assert len(request.policy_spans) <= len(tokens)
        assert len(request.kv_spans) <= len(tokens)


@pytest.mark.parametrize("seed", range(LIVES) if "ROLLOUT_LIFE_SEED" not in os.environ else [])
def test_every_completion_of_a_random_life_is_the_trainers(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is clamped to")
        Life(seed).live()


@pytest.mark.skipif("ROLLOUT_LIFE_SEED" not in os.environ, reason="replays the seed that ROLLOUT_LIFE_SEED names")
def test_the_chosen_life_replays() -> None:
    Life(int(os.environ["ROLLOUT_LIFE_SEED"])).live()
