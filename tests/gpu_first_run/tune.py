"""Stage `tune`: decode attention alone, by tile, keys per part, and number of programs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import torch

from rollout.engine.kernels import decode_parts, triton_paged
from rollout.engine.kernels.decode_parts import DecodeParts
from tests.gpu_first_run.findings import HEAD_DIM, Run
from tests.gpu_first_run.speed import seconds

SHAPES = ((64, 1024, 16, 8), (64, 4096, 32, 8), (256, 1024, 32, 8))
"""Sequences, tokens of each, query heads, KV heads."""
SETTINGS = {"span": (64, 128), "warps": (4, 8), "stages": (2, 3), "split": (256, 512), "programs": (8, 32, 128)}
"""Values of what `triton_paged` and `decode_parts` have fixed; programs: of each processor."""
ROOM = 4
"""Room in the list of parts, as a multiple of those that there are: a captured step has more than it needs."""
BLOCK = 16


def tune(run: Run) -> None:
    """Bytes a second of each shape by setting, and the setting that is best over all shapes."""
    paged = triton_paged.load(run.device)
    if paged is None:
        raise RuntimeError("the Triton kernels do not load; see the warning above")
    settings = list(product(*SETTINGS.values())) if run.cuda else [(64, 4, 2, 512, 1), (64, 4, 2, 1024, 2)]
    shapes = SHAPES if run.cuda else ((1, 300, 2, 1),)
    processors = torch.cuda.get_device_properties(run.device).multi_processor_count if run.cuda else 1
    # The interpreter does not multiply bf16.
    dtype = torch.bfloat16 if run.cuda else torch.float32
    rates: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for batch, context, heads, kv_heads in shapes:
        blocks = batch * -(-context // BLOCK)
        keys = torch.randn(blocks, BLOCK, kv_heads, HEAD_DIM, device=run.device, dtype=dtype)
        table = torch.randperm(blocks, device=run.device).int().view(batch, -1)
        query = torch.randn(batch, heads, HEAD_DIM, device=run.device, dtype=dtype)
        last = torch.full((batch,), context - 1, device=run.device, dtype=torch.int32)
        plan = triton_paged._plan("decode", heads // kv_heads, HEAD_DIM, dtype)
        for setting in settings:
            span, warps, stages, split, programs = setting
            tile = replace(plan, span=span, warps=warps, stages=stages)
            with (
                patch.object(triton_paged, "_plan", lambda *_, tile=tile: tile),
                patch.object(triton_paged, "_programs", lambda _, count=programs * processors: count),
                patch.object(decode_parts, "SPLIT", split),
            ):
                parts = DecodeParts(last, ROOM * batch * decode_parts.num_splits(context))
                attend = partial(paged.decode, query, keys, keys, table, parts, scaling=HEAD_DIM**-0.5)
                try:
                    spent = seconds(run, attend, 20 if run.cuda else 1)
                except Exception as exc:  # noqa: BLE001 - a tile that the device has no room for
                    run.say("a tile that does not work", setting=setting, why=str(exc)[:100])
                else:
                    rates[setting].append(2 * batch * context * keys[0, 0].nbytes / spent / 1e12)
        found = sorted(((round(each[-1], 3), *setting) for setting, each in rates.items()), reverse=True)
        run.say("decode attention, TB/s", batch=batch, context=context, heads=heads, of=list(SETTINGS), best=found[:5])
        del keys
        run.collect()
    # Geometric, so that each shape counts the same; a setting that fails in some shape is no candidate.
    means = {each: math.prod(found) ** (1 / len(found)) for each, found in rates.items() if len(found) == len(shapes)}
    best = max(means, key=means.__getitem__)
    run.say("tuned", best=dict(zip(SETTINGS, best, strict=True)), tb_s=means[best])
