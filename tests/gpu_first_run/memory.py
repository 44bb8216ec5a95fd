"""Stage `memory`: does the KV pool come back?"""

from __future__ import annotations

import time

import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import Run, captured, gib, prompts

TURNS, REQUESTS, STEPS = 3, 64, 120


def memory(run: Run) -> None:
    """Three turns of rollout, suspend, a training step (AdamW's states are made in the first) and resume."""
    run.say_memory("start")
    model = run.model("1.7b" if run.cuda else "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    free = torch.cuda.mem_get_info(run.device)[0] if run.cuda else 2**24
    with run.engine(model, kv_cache_memory_gb=0.75 * free / 2**30) as engine:
        run.say(
            "pool", gib=gib(engine.cache.device_bytes), blocks=engine.cache.num_blocks,
            headroom_gib=gib(engine.context.headroom), address=engine.cache.layer(0)[0].data_ptr(),
        )  # fmt: skip
        for turn in range(TURNS):
            _roll(run, engine, turn)
            _suspend(run, engine, turn)
            ids = torch.randint(0, model.config.vocab_size, (4, 2048 if run.cuda else 16), device=run.device)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.say_memory(f"turn {turn}: trained")
            _resume(run, engine, turn)
    del engine, model, optimizer
    run.collect()
    run.say_memory("all dropped")


def _roll(run: Run, engine: DynamicInferenceEngine, turn: int) -> None:
    length = 512 if run.cuda else 20
    for prompt in prompts(engine.model, REQUESTS if run.cuda else 2, length, length, turn):
        engine.add_request(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    start = time.perf_counter()
    with engine.installation:
        for _ in range(STEPS if run.cuda else 4):
            engine.step()
    run.wait()
    run.say("steps", turn=turn, seconds=time.perf_counter() - start, **captured(engine))
    run.say_memory(f"turn {turn}: after the steps")


def _suspend(run: Run, engine: DynamicInferenceEngine, turn: int) -> None:
    engine.pause()
    start = time.perf_counter()
    moved = engine.suspend("offload")
    run.wait()
    run.say(
        "suspend", turn=turn, seconds=time.perf_counter() - start, copied_gib=gib(moved.bytes_copied),
        host_pool_gib=gib(engine.cache.host_bytes),
    )  # fmt: skip
    run.say_memory(f"turn {turn}: suspended")


def _resume(run: Run, engine: DynamicInferenceEngine, turn: int) -> None:
    engine.weights_updated()
    start = time.perf_counter()
    back = engine.resume()
    run.wait()
    run.say(
        "resume", turn=turn, seconds=time.perf_counter() - start, copied_gib=gib(back.bytes_copied),
        shrunk_by_blocks=back.shrunk_by_blocks, of=engine.context.num_blocks, address=engine.cache.layer(0)[0].data_ptr(),
    )  # fmt: skip
    engine.unpause()
    for number in {record.request_id for record in engine.snapshot()}:
        engine.abort_request(number)
    engine.take_ended()
