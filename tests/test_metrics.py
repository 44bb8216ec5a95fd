"""Tests of the recorder: values are reported under the names of the table, and no others."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from rollout.manager.telemetry import NEWEST, MetricsRecorder
from rollout.observe.metric_table import LOGGED, METRICS, PHASES, Kind, describe
from tests.rollouts import Clock


def fill(recorder: MetricsRecorder, clock: Clock) -> None:
    """Record something under every name."""
    for name, metric in METRICS.items():
        if not metric.logged:
            continue
        if metric.kind is Kind.COUNTER:
            recorder.add(name, 2)
        elif metric.kind is Kind.GAUGE:
            recorder.set(name, 3)
        elif metric.kind is Kind.SUMMARY:
            recorder.observe(name, [1.0, 2.0])
    for phase in PHASES:
        recorder.enter_phase(phase)
        clock.now += 1


def test_no_two_metrics_log_under_the_same_name():
    flat = [logged for name, metric in METRICS.items() for logged in metric.logged_as(name)]
    assert len(flat) == len(set(flat)) >= 40


def test_a_ratio_is_made_of_names_that_are_logged():
    for metric in METRICS.values():
        assert {metric.numerator, *metric.denominator} - {""} <= set(LOGGED)
        assert bool(metric.numerator) == bool(metric.denominator) == (metric.kind is Kind.RATIO)


def test_the_description_has_one_row_per_logged_name():
    rows = describe().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(LOGGED)
    assert all(row.count("|") == 5 for row in rows)


def test_a_snapshot_of_everything_holds_exactly_the_logged_names():
    clock = Clock()
    recorder = MetricsRecorder(clock)
    fill(recorder, clock)
    snapshot = recorder.snapshot()
    assert list(snapshot) == list(LOGGED)
    assert all(isinstance(value, float) for value in snapshot.values())


def test_before_anything_happens_a_snapshot_holds_zero_counters_and_timers_only():
    snapshot = MetricsRecorder(Clock()).snapshot()
    assert set(snapshot.values()) == {0.0}
    assert {LOGGED[name].kind for name in snapshot} == {Kind.COUNTER, Kind.TIMER}


def test_a_counter_covers_the_interval_and_its_total_the_run():
    recorder = MetricsRecorder(Clock())
    recorder.add("rollout/generated_tokens", 5)
    recorder.snapshot()
    recorder.add("rollout/generated_tokens", np.int64(7))
    recorder.add("rollout/preemptions")
    snapshot = recorder.snapshot()
    assert snapshot["rollout/generated_tokens"] == 7
    assert snapshot["rollout/generated_tokens_total"] == 12
    assert snapshot["rollout/preemptions"] == 1
    assert recorder.snapshot()["rollout/preemptions"] == 0


def test_looking_without_reset_changes_nothing():
    clock = Clock()
    recorder = MetricsRecorder(clock)
    fill(recorder, clock)
    assert recorder.snapshot(reset=False) == recorder.snapshot(reset=False) == recorder.snapshot()


def test_a_gauge_keeps_its_value_and_its_peak_begins_anew_with_the_interval():
    recorder = MetricsRecorder(Clock())
    for running in (1, 9, 2):
        recorder.set("rollout/requests_running", running)
    first, second = recorder.snapshot(), recorder.snapshot()
    assert (first["rollout/requests_running"], first["rollout/requests_running_peak"]) == (2, 9)
    assert (second["rollout/requests_running"], second["rollout/requests_running_peak"]) == (2, 2)


def test_counts_from_several_threads_all_arrive():
    recorder = MetricsRecorder(Clock())
    seen = []

    def work() -> None:
        for _ in range(2000):
            recorder.add("rollout/steps")
        seen.append(recorder.snapshot()["rollout/steps"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(seen) + recorder.snapshot()["rollout/steps"] == 8000


def test_a_summary_has_mean_and_maximum_of_all_values_and_percentiles_of_the_newest():
    recorder = MetricsRecorder(Clock())
    values = np.random.default_rng(3).integers(0, 1000, 3 * NEWEST)
    for part in np.array_split(values, 7):
        recorder.observe("rollout/completion_length", part)
    snapshot = recorder.snapshot()
    assert snapshot["rollout/completion_length_mean"] == pytest.approx(values.mean())
    assert snapshot["rollout/completion_length_p50"] == np.percentile(values[-NEWEST:], 50)
    assert snapshot["rollout/completion_length_p99"] == np.percentile(values[-NEWEST:], 99)
    assert snapshot["rollout/completion_length_max"] == values.max()


def test_a_summary_without_observation_is_absent_and_the_interval_forgets():
    recorder = MetricsRecorder(Clock())
    recorder.observe("rollout/ttft_s", [])
    assert "rollout/ttft_s_mean" not in recorder.snapshot()
    recorder.observe("rollout/ttft_s", 9.0)
    recorder.snapshot()
    assert "rollout/ttft_s_max" not in recorder.snapshot()
    recorder.observe("rollout/ttft_s", 1.0)
    assert recorder.snapshot()["rollout/ttft_s_max"] == 1.0


def test_a_summary_takes_numbers_arrays_and_tensors_of_any_shape():
    torch = pytest.importorskip("torch")
    recorder = MetricsRecorder(Clock())
    recorder.observe("rollout/logprob_diff", 1)
    recorder.observe("rollout/logprob_diff", [[2.0, 3.0], [4.0, 5.0]])
    recorder.observe("rollout/logprob_diff", torch.full((1, 2), 6.0, dtype=torch.bfloat16, requires_grad=True))
    assert recorder.snapshot()["rollout/logprob_diff_mean"] == pytest.approx(27 / 7)


def test_a_nan_shows_in_the_statistics_instead_of_vanishing():
    recorder = MetricsRecorder(Clock())
    recorder.observe("rollout/logprob_diff", [0.1, math.nan])
    snapshot = recorder.snapshot()
    assert math.isnan(snapshot["rollout/logprob_diff_mean"])
    assert math.isnan(snapshot["rollout/logprob_diff_max"])


def test_wall_time_belongs_to_exactly_one_phase_and_time_before_the_first_to_none():
    clock = Clock()
    recorder = MetricsRecorder(clock)
    clock.now += 50
    recorder.enter_phase("generate")
    clock.now += 6
    with recorder.phase("suspend"):
        clock.now += 1
    recorder.enter_phase("train")
    clock.now += 2
    with recorder.phase("resume"):
        clock.now += 1
    snapshot = recorder.snapshot()
    assert [snapshot[f"rollout/{phase}_s"] for phase in PHASES] == [6, 1, 2, 1]
    assert [snapshot[f"rollout/time_share_{phase}"] for phase in PHASES] == [0.6, 0.1, 0.2, 0.1]


def test_ratios_are_of_the_interval():
    recorder = MetricsRecorder(Clock())
    recorder.observe("rollout/policy_staleness", [0, 0, 1, 3])
    recorder.observe("rollout/request_s", [1, 1, 1, 5])
    recorder.add("rollout/prefill_tokens_saved", 30)
    recorder.add("rollout/prefill_tokens_computed", 10)
    snapshot = recorder.snapshot()
    names = ("policy_staleness_nonzero_share", "tail_factor", "prefix_hit_rate")
    assert [snapshot[f"rollout/{name}"] for name in names] == [0.5, 2.5, 0.75]


def test_a_name_outside_of_the_table_is_refused():
    recorder = MetricsRecorder(Clock())
    for record in (recorder.add, recorder.set, recorder.observe):
        with pytest.raises(KeyError):
            record("rollout/preemption", 1)
