"""Random event sequences ("lives") of an engine, each from one seed, checked value by value against the oracle.

    python -m tests.lives --seeds 0 500        these lives
    python -m tests.lives --seed 1234          one of them, event by event

A life draws an architecture, a configuration, sampling parameters, and events. Groups are submitted (also the next turn
of a conversation), steps are made, and samples are aborted. The engine is paused, and suspended in every mode with less
memory at its return. Weights change anywhere in between, and Ctrl-C interrupts a layer. An engine of another
configuration continues what was in flight, and samples that are too old restart from their prompts.

The ledger knows from outside how many tokens each sample had after each event, and so under which version each was made.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests.events import DynamicInferenceEventType as Kind
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason
from tests.engines import Key, Room, make_engine, token_ids
from tests.invariants import check_scheduler
from tests.models import VOCAB, make_model
from tests.oracle import Policy, check_record

ROOM = 10**12
MOST_STEPS = 4000
"""Until everything has ended."""

ARCHITECTURES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "qwen3": lambda draw: {"head_dim": draw.choice([8, 16, 20, 32]), "num_key_value_heads": draw.choice([1, 2, 4])},
    "llama": lambda draw: {"num_key_value_heads": draw.choice([1, 2, 4]), "attention_bias": draw.random() < 0.5},
    "qwen2": lambda draw: {"tie_word_embeddings": draw.random() < 0.5},
    "mistral": lambda draw: {"sliding_window": draw.choice([2, 5, 8, 20, None])},
    "gemma2": lambda draw: {"sliding_window": draw.choice([3, 8]), "attn_logit_softcapping": draw.choice([2.0, 50.0])},
    "gemma3": lambda draw: {"sliding_window": draw.choice([2, 8, 13])},
    "gpt2": lambda draw: {},
    "qwen3_moe": lambda draw: {},
}
RECURRENT: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "qwen3_next": lambda draw: {"linear_conv_kernel_dim": draw.choice([2, 4])},
    "falcon_h1": lambda draw: {"mamba_n_groups": draw.choice([1, 2])},
    "lfm2": lambda draw: {"conv_L_cache": draw.choice([2, 3])},
}
"""With recurrent states: lives of their own, so that the seeds of the others stay what they were."""


class Life:
    """One seed's engine, what was asked of it, and what became of that.

    Args:
        seed: decides everything.
        say: told each event.
        events: how many happen before the engine is left to end what is in flight.
        architectures: one of them is drawn.
    """

    def __init__(
        self,
        seed: int,
        say: Callable[..., object] = lambda *_: None,
        events: int = 50,
        architectures: Mapping[str, Callable[[random.Random], dict[str, Any]]] = ARCHITECTURES,
    ) -> None:
        self.draw = random.Random(seed)
        self.say = say
        self.events = events
        pick = self.draw.choice
        name = pick(sorted(architectures))
        changes = architectures[name](self.draw)
        self.recurrent = name in RECURRENT
        self.ahead = seed % 3 != 1
        self.policy = Policy(make_model(name, seed=seed, **changes), seed)
        self.options: dict[str, Any] = self.configuration() | {
            "max_staleness": pick([None, None, 0, 1, 2]),
            "staleness_policy": pick(["partial", "requeue", "requeue", "mask"]),
            "fused_forward": self.draw.random() < 0.8,
            "track_generated_token_events": self.draw.random() < 0.3,
        }
        say(name, changes, self.options)
        self.room = Room()
        self.engine = self.new_engine()
        self.stems = [token_ids(24, stem) for stem in range(2)]
        self.wanted: dict[Key, SamplingParams] = {}
        self.given_up: set[Key] = set()
        self.ledger: dict[Key, list[int]] = {}
        self.ended: dict[Key, DynamicInferenceRequestRecord] = {}
        self.rooms: dict[Key, list[int]] = {}
        """`max_sequence_length` of every engine that a sample was in, to which its budget was clamped."""

    def configuration(self) -> dict[str, Any]:
        """Draw the configuration of an engine; a later engine continues under another one."""
        pick = self.draw.choice
        block = pick([1, 2, 4, 5, 16])
        return {
            "kv_cache_blocks": pick([48, 64, 100, 400]) // block, "max_requests": pick([2, 4, 6]),
            "block_size_tokens": block, "max_tokens_per_step": pick([6, 11, 40]), "seed": self.draw.randrange(99),
            "max_sequence_length": pick([30, 40, 60, 80]), "enable_prefix_caching": pick([True, True, True, False]),
            "prefix_caching_eviction_policy": pick(["lru", "lru", "ref_zero"]),
            "state_slots": pick([2, 3, 6, 12]) if self.recurrent else None,
        }  # fmt: skip

    def new_engine(self) -> DynamicInferenceEngine:
        return make_engine(self.policy.model, allocate=self.room.allocate, **self.options)

    # --- what happens -------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """A group: of one of two stems, or what comes after an earlier completion."""
        pick, draw = self.draw.choice, self.draw
        prompt = pick(self.stems)[: pick([20, draw.randint(1, 20)])] + token_ids(pick([0, 0, 1, 4]), draw.randrange(99))
        finished = [record for record in self.ended.values() if record[-1].succeeded()]
        if finished and draw.random() < 0.25:
            last = pick(finished)[-1]
            prompt = last.prompt_tokens + last.generated_tokens + token_ids(draw.randint(0, 4), draw.randrange(99))
        params = self.parameters()
        try:
            number = self.engine.add_request(prompt, params, priority=pick([0, 0, 0, 1]))
        except InvalidRequestError as exc:
            self.say("  refused:", exc)
            return
        self.say("  request", number, len(prompt), "tokens,", params)
        self.wanted |= {(number, index): params for index in range(params.n)}

    def parameters(self) -> SamplingParams:
        pick, draw = self.draw.choice, self.draw
        chosen: dict[str, Any] = {
            "n": pick([1, 1, 1, 2, 3]), "max_tokens": pick([draw.randint(0, 24), 40]),
            "temperature": pick([0, 0.5, 1.0, 1.0, 1.7]),
            "ignore_eos": draw.random() < 0.7, "seed": pick([None, draw.randrange(5)]),
            "prompt_logprobs": pick([None, None, 0, 2]), "logprobs": pick([None, None, 0, 3]),
            "stop_token_ids": [draw.randrange(VOCAB)], "logprobs_mode": pick(["processed", "processed", "raw"]),
        }  # fmt: skip
        chosen["min_tokens"] = pick([0, 0, draw.randint(0, chosen["max_tokens"])])
        if draw.random() < 0.5:
            chosen |= {"top_k": pick([0, 1, 5, 40]), "top_p": pick([1.0, 0.9, 0.5]), "min_p": pick([0.0, 0.0, 0.05])}
        if draw.random() < 0.3:
            chosen |= {"repetition_penalty": pick([1.0, 1.3]), "presence_penalty": pick([0.0, 0.5, -1.0]),
                       "frequency_penalty": pick([0.0, 0.25])}  # fmt: skip
        if draw.random() < 0.2:
            chosen["logit_bias"] = {draw.randrange(VOCAB): pick([-1e9, 3.0]) for _ in range(3)}
        params = SamplingParams(**chosen)
        return params.replace(return_kept_tokens=params.truncated and not params.greedy)

    def step(self) -> None:
        """Make a step of the engine, if it has work."""
        if self.engine.has_unfinished:
            self.take(self.engine.step(ahead=self.ahead))

    def abort(self) -> None:
        """One sample, or its whole group."""
        if alive := sorted(set(self.wanted) - set(self.ended) - self.given_up):
            number, index = self.draw.choice(alive)
            self.engine.abort_request(number, self.draw.choice([None, index]))

    def update(self) -> None:
        """Other weights."""
        self.policy.update()
        self.engine.weights_updated()

    def pause(self) -> None:
        """A while without steps."""
        self.engine.pause()
        self.meanwhile()
        self.engine.unpause()

    def suspend(self) -> None:
        """In every mode; memory may be short afterwards."""
        mode = self.draw.choice(["persist", "offload", "offload", "recompute"])
        self.say("  mode", mode)
        self.engine.pause()
        self.engine.suspend(mode, keep_prefix_cache=self.draw.random() < 0.5)
        self.meanwhile()
        if self.draw.random() < 0.4:
            self.room.leave(self.draw.uniform(0.1, 1.0) * self.options["kv_cache_blocks"], self.engine)
        try:
            self.engine.resume()
        except EngineStateError:
            self.room.bytes = ROOM
            self.engine.resume()
        self.room.bytes = ROOM
        self.engine.unpause()

    def meanwhile(self) -> None:
        """Submit, abort or update while the engine makes no steps."""
        for event in self.draw.sample([self.submit, self.abort, self.update], self.draw.randrange(3)):
            self.happens(event)

    def interrupt(self) -> None:
        """Ctrl-C in a layer."""

        def press(*_: object) -> None:
            raise KeyboardInterrupt

        layers = [module for name, module in self.policy.model.named_modules() if name.endswith((".0", ".1", "norm"))]
        handle = self.draw.choice(layers).register_forward_pre_hook(press)
        try:
            self.step()
        except KeyboardInterrupt:
            self.say("  Ctrl-C")
        finally:
            handle.remove()

    def restart(self) -> None:
        """Save what is in flight, and continue it with an engine of another configuration."""
        self.take(self.engine.take_ended())
        version, number = self.engine.policy_version, self.engine.parts.intake.next_request_id
        saved = msgpack.packb([record.serialize() for record in self.engine.snapshot()], use_bin_type=True)
        self.options |= self.configuration()
        self.say(" ", self.options)
        self.engine = self.new_engine()
        self.engine.weights_updated(version)
        self.engine.parts.intake.reserve(number)
        for plain in msgpack.unpackb(saved):
            record = DynamicInferenceRequestRecord.deserialize(plain)
            try:
                self.engine.add_record(record)
            except InvalidRequestError as exc:
                self.say("  cannot go on here:", exc)
                self.given_up.add((record.request_id, record.sample_index))

    # --- the ledger ---------------------------------------------------------------------------------------------

    def happens(self, event: Callable[[], None]) -> None:
        """One event, and a look at what it has changed."""
        self.say(event.__name__)
        event()
        self.take(self.engine.take_ended() if event != self.step else [])
        self.look()
        check_scheduler(self.engine.context.scheduler)

    def look(self) -> None:
        """Tokens that a sample has gained are of the present version; one that has fewer has started afresh."""
        table = self.engine.context.scheduler.table
        for sample in self.engine.context.scheduler:
            made = len(sample.request.completion_tokens)
            if sample.active:
                made = int(table.length[sample.row] - table.origin[sample.row])
            self.note(sample.key, made)

    def note(self, key: Key, made: int) -> None:
        of_it, rooms = self.ledger.setdefault(key, []), self.rooms.setdefault(key, [])
        if self.engine.parts.max_sequence_length not in rooms[-1:]:
            rooms.append(self.engine.parts.max_sequence_length)
        if made < len(of_it):
            of_it.clear()
        of_it += [self.engine.policy_version] * (made - len(of_it))

    def take(self, records: Sequence[DynamicInferenceRequestRecord]) -> None:
        for record in records:
            key = (record.request_id, record.sample_index)
            assert key in self.wanted, f"{key} was not asked for"
            assert key not in self.ended, f"{key} ended twice"
            self.ended[key] = record
            if record[-1].finish_reason not in (FinishReason.ABORT, FinishReason.STALE):
                self.note(key, record.merge().generated_length)

    # --- a life -------------------------------------------------------------------------------------------------

    def live(self) -> int:
        """Live to the end; return how many tokens were compared.

        Raises:
            AssertionError: something was lost, leaked, or is not what the oracle says.
        """
        actions = [
            self.submit, self.step, self.abort, self.pause, self.suspend, self.update, self.restart, self.interrupt
        ]  # fmt: skip
        self.happens(self.submit)
        updates, restarts = self.draw.choice([3, 8]), self.draw.choice([1, 3])
        for _ in range(self.events):
            self.happens(self.draw.choices(actions, [8, 24, 1, 1, 2, updates, restarts, 1])[0])
        for _ in range(MOST_STEPS):
            if not self.engine.has_unfinished:
                break
            self.happens(self.step)
        assert set(self.ended) == set(self.wanted) - self.given_up, "a request was lost"
        assert self.engine.context.allocator.num_used == 0, "a block leaked"
        assert self.engine.context.allocator.states.num_held == 0, "a state slot leaked"
        return sum(self.check(key) for key in sorted(self.ended))

    def check(self, key: Key) -> int:
        """One sample, against the ledger and the oracle."""
        record = self.ended[key]
        merged = record.merge()
        params, made, length = self.wanted[key], merged.generated_tokens, len(merged.prompt_tokens)
        self.say("check", merged, merged.finish_reason)
        versions = merged.policy_versions[length:].tolist()
        assert versions == self.ledger.get(key, [])[: len(made)], f"{key}: {versions}, not {self.ledger.get(key)}"
        ages = [merged.policy_version - version for version in versions]
        assert merged.policy_staleness[length:].tolist() == ages
        limit = self.options["max_staleness"]
        reason = merged.finish_reason
        if reason is FinishReason.ERROR:
            raise AssertionError(f"{merged!r}: {merged.error}")
        assert (reason is FinishReason.ABORT) == merged.failed()
        if limit is not None and self.options["staleness_policy"] != "mask" and reason is not FinishReason.STALE:
            assert max(ages, default=0) <= limit, f"{key} is {max(ages)} updates old"
        rooms = self.rooms.get(key, [])
        assert not made or length + len(made) <= rooms[-1], f"{key} is longer than max_sequence_length={rooms[-1]}"
        if reason is FinishReason.LENGTH:
            assert len(made) == params.max_tokens or length + len(made) in rooms, f"{key} is cut short"
        stop_ids = self.engine.controller.stop_ids(params)
        self.check_events(record)
        return check_record(self.policy, record, stop_ids)

    def check_events(self, record: DynamicInferenceRequestRecord) -> None:
        """They begin and end as they must, and every interruption is among them."""
        merged = record.merge()
        kinds = [event.type for event in merged.events]
        assert kinds[0] is Kind.ADD_ENGINE
        assert kinds[-1] is (Kind.FAIL if merged.failed() else Kind.FINISH)
        times = [event.timestamp for event in merged.events]
        assert times == sorted(times)
        assert Kind.ADD_CONTEXT in kinds or not merged.generated_tokens
        tokens = kinds.count(Kind.GENERATED_TOKEN)
        if self.options["track_generated_token_events"]:
            assert tokens >= len(merged.generated_tokens)
        else:
            assert not tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    chosen.add_argument("--seed", type=int, help="one, event by event")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.seed is not None:
        print(Life(given.seed, say=print).live())
        return 0
    failed = []
    for seed in range(*given.seeds):
        try:
            print(f"seed {seed}: {Life(seed).live()} tokens", flush=True)
        except Exception as exc:  # noqa: BLE001 - a fuzzer reports whatever it finds and goes on
            failed.append(seed)
            where = traceback.extract_tb(exc.__traceback__)[-1]
            print(f"seed {seed}: {type(exc).__name__}: {str(exc)[:300]}  ({where.filename}:{where.lineno})", flush=True)
    print(f"{len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
