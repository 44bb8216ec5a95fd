"""Stage `tune`: decode attention alone, by tile, keys per part, and number of programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from rollout.engine.kernels import decode_parts, triton_paged
from rollout.engine.kernels.decode_parts import DecodeParts
from tests.gpu_first_run.findings import HEAD_DIM, Run
from tests.gpu_first_run.speed import seconds

SHAPES = ((64, 1024, 16, 8), (64, 4096, 32, 8), (256, 1024, 32, 8))
"""Sequences, tokens of each, query heads, KV heads."""
PROGRAMS = (4, 8, 16, 32, 64, 128)
"""For each processor of the device."""
ROOM = 4
"""Room in the list of parts, as a multiple of those that there are: a captured step has more than it needs."""
BLOCK = 16


class Setting(NamedTuple):
    """What `triton_paged` and `decode_parts` have fixed."""

    span: int
    warps: int
    stages: int
    split: int
    programs: int


class Case:
    """Queries and a pool of one shape, in bf16."""

    def __init__(self, run: Run, batch: int, context: int, heads: int, kv_heads: int) -> None:
        blocks = batch * -(-context // BLOCK)
        self.shape = {"batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads}
        # The interpreter does not multiply bf16.
        dtype = torch.bfloat16 if run.cuda else torch.float32
        self._keys = torch.randn(blocks, BLOCK, kv_heads, HEAD_DIM, device=run.device, dtype=dtype)
        self._values = torch.randn_like(self._keys)
        self._table = torch.randperm(blocks, device=run.device).int().view(batch, -1)
        self._query = torch.randn(batch, heads, HEAD_DIM, device=run.device, dtype=dtype)
        self._last = torch.full((batch,), context - 1, device=run.device, dtype=torch.int32)
        self._run = run

    def rate(self, paged: triton_paged.TritonPaged, setting: Setting) -> float:
        """Bytes of K and V a second."""
        batch, context = self.shape["batch"], self.shape["context"]
        parts = DecodeParts(self._last, ROOM * batch * decode_parts.num_splits(context))
        scaling = HEAD_DIM**-0.5
        attend = partial(paged.decode, self._query, self._keys, self._values, self._table, parts, scaling=scaling)
        size = batch * context * self._keys.shape[2] * HEAD_DIM * self._keys.element_size()
        return 2 * size / seconds(self._run, attend, 20 if self._run.cuda else 1)


def tune(run: Run) -> None:
    """Bytes a second of each shape by tile, then by number of programs, and the setting that is best over all shapes."""
    paged = triton_paged.load(run.device)
    if paged is None:
        raise RuntimeError("the Triton kernels do not load; see the warning above")
    shapes = SHAPES if run.cuda else ((1, 300, 2, 1),)
    (present,) = {_present(run, heads // kv_heads) for _, _, heads, kv_heads in shapes}
    rates: dict[Setting, list[float]] = defaultdict(list)
    _measure(run, paged, shapes, _tiles(run, present), rates)
    best = _best(rates)
    counts = PROGRAMS if run.cuda else (1, 2)
    tried = [each._replace(programs=count) for each in dict.fromkeys((present, best)) for count in counts]
    _measure(run, paged, shapes, [each for each in tried if each not in rates], rates)
    best, now = _best(rates), _mean(rates[present])
    by_programs = {each.programs: _mean(rates[each]) / 1e12 for each in tried[: len(counts)]}
    run.say(
        "tuned", present=present._asdict(), present_tb_s=now / 1e12,
        best=best._asdict(), best_tb_s=_mean(rates[best]) / 1e12, times_the_present=_mean(rates[best]) / now,
        present_tile_by_programs_tb_s=by_programs,
    )  # fmt: skip


def _measure(
    run: Run,
    paged: triton_paged.TritonPaged,
    shapes: Sequence[tuple[int, int, int, int]],
    settings: Sequence[Setting],
    rates: dict[Setting, list[float]],
) -> None:
    for shape in shapes:
        case = Case(run, *shape)
        found = dict(_rates(run, paged, case, settings))
        for setting, rate in found.items():
            rates[setting].append(rate)
        ordered = sorted(((round(rate / 1e12, 3), *setting) for setting, rate in found.items()), reverse=True)
        run.say("decode attention, TB/s", **case.shape, of=Setting._fields, best=ordered[:5], worst=ordered[-2:])
        del case
        run.collect()


def _best(rates: dict[Setting, list[float]]) -> Setting:
    # One that does not work in some shape is no candidate.
    shapes = max(map(len, rates.values()))
    return max((each for each in rates if len(rates[each]) == shapes), key=lambda each: _mean(rates[each]))


def _mean(rates: Sequence[float]) -> float:
    """Geometric: each shape counts the same."""
    return math.prod(rates) ** (1 / len(rates))


def _present(run: Run, group: int) -> Setting:
    plan = triton_paged._plan("decode", group, HEAD_DIM, torch.bfloat16 if run.cuda else torch.float32)
    return Setting(plan.span, plan.warps, plan.stages, decode_parts.SPLIT, triton_paged.PROGRAMS)


def _tiles(run: Run, present: Setting) -> Sequence[Setting]:
    """Tiles and keys per part, with as many programs as now."""
    if not run.cuda:
        return [present, present._replace(split=2 * present.split)]
    chosen = product((64, 128), (4, 8), (2, 3), (256, 512))
    return list(dict.fromkeys([present, *(Setting(*each, present.programs) for each in chosen)]))


def _rates(
    run: Run, paged: triton_paged.TritonPaged, case: Case, settings: Sequence[Setting]
) -> Iterator[tuple[Setting, float]]:
    for setting in settings:
        with _fixed(setting, run.device):
            try:
                yield setting, case.rate(paged, setting)
            except Exception as exc:  # noqa: BLE001 - a tile that the device has no room for
                run.say("a tile that does not work", setting=setting._asdict(), why=str(exc)[:100])


@contextmanager
def _fixed(setting: Setting, device: torch.device) -> Iterator[None]:
    """A block in which decode attention runs so."""
    plan, split, programs = triton_paged._plan, decode_parts.SPLIT, triton_paged._programs
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def chosen(mode: str, group: int, dim: int, dtype: torch.dtype) -> triton_paged._Plan:
        tile = plan(mode, group, dim, dtype)
        return triton_paged._Plan(tile.rows, setting.span, setting.warps, setting.stages)

    triton_paged._plan, decode_parts.SPLIT = chosen, setting.split
    triton_paged._programs = lambda _: setting.programs * processors  # type: ignore[assignment]
    try:
        yield
    finally:
        triton_paged._plan, decode_parts.SPLIT, triton_paged._programs = plan, split, programs
