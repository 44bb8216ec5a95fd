"""Tests of the TRL integration: GRPOTrainer trains on the rollout's completions with their sampling log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TrainerCallback

from rollout.engine.models.routers import routers_of
from rollout.errors import ConfigError, RolloutFailedError
from rollout.manager.manager import RolloutManager
from rollout.manager.scoring import rewards_differ
from rollout.state import EngineState
from tests.models import make_model
from tests.ranks import run_together
from tests.rollouts import assert_nothing_leaked, make_rollout
from tests.routers import LowestExperts
from trainer_hooks.optimizer import attach as attach_optimizer
from trainer_hooks.trl import attach
from trainer_hooks.trl_config import sampling_params
from trainer_hooks.trl_episodes import episode_rollout_func

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tests.trainer_hooks import trl_jobs  # noqa: E402
from tests.trainer_hooks.trl_jobs import OPTIONS, PROMPTS, chat_tokenizer, logged  # noqa: E402

GROUP = 4


@dataclass
class Marker:
    """A reward function that differs between equal completions, and remembers what it was shown."""

    __name__ = "marker"
    steps: list[int] = field(default_factory=list)
    prompts: list[list[Any]] = field(default_factory=list)
    ids: list[list[list[int]]] = field(default_factory=list)
    completions: list[list[Any]] = field(default_factory=list)

    def __call__(self, prompts, completions, completion_ids, trainer_state, **columns: Any) -> list[float]:
        self.steps.append(trainer_state.global_step)
        self.prompts.append(list(prompts))
        self.ids.append([list(each) for each in completion_ids])
        self.completions.append(list(completions))
        return [float(row % 3) + 0.1 * (ids[0] % 5) for row, ids in enumerate(completion_ids)]


class Spy(TrainerCallback):
    """The rollout in the middle of training: (global step, version, engine state) per micro-step."""

    def __init__(self, manager: RolloutManager) -> None:
        self.watched = manager
        self.seen: list[tuple[int, int, EngineState]] = []

    def _note(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, self.watched.policy_version, self.watched.engine.state))

    on_substep_end = on_pre_optimizer_step = on_step_end = _note


@dataclass
class Run:
    """A GRPOTrainer with a small model, and what generates for it."""

    model: PreTrainedModel
    trainer: Any
    manager: RolloutManager
    marker: Marker

    def metric(self, name: str) -> list[float]:
        """Its values in the trainer's log."""
        return logged(self.trainer, name)


Maker = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Maker]:
    """`make_run("default" | "attach", on_error=..., engine={...}, **options of GRPOConfig)`."""
    made: list[RolloutManager] = []

    def make(
        kind: str, *, on_error: Any = "raise", prompts: Any = PROMPTS, engine: Any = None, replay: Any = None,
        architecture: str = "qwen3", **options: Any,
    ) -> Run:  # fmt: skip
        model, tokenizer, marker = make_model(architecture, num_hidden_layers=1), chat_tokenizer(), Marker()
        if architecture == "qwen3":
            # As long as there are layers: else it cannot be saved.
            model.config.layer_types = model.config.layer_types[:1]
        rows = {"per_device_train_batch_size": 2 * GROUP, "num_generations": GROUP, "max_completion_length": 10}
        config = trl.GRPOConfig(output_dir=str(tmp_path), **(OPTIONS | rows | options))
        data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        manager = make_rollout(model, tokenizer, **(engine or {}))
        made.append(manager)
        trainer = trl.GRPOTrainer(
            model, marker, args=config, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
        )  # fmt: skip
        if kind == "attach":
            attach(trainer, manager, on_error=on_error, replay=replay)
        return Run(model, trainer, manager, marker)

    yield make
    for manager in made:
        manager.close()


class Replay(LogitsProcessor):
    """Makes transformers' generate sample given completions."""

    def __init__(self, completions: list[list[int]]) -> None:
        self._completions = completions
        self._position = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -math.inf)
        for row, completion in enumerate(self._completions):
            forced[row, completion[min(self._position, len(completion) - 1)]] = 0.0
        self._position += 1
        return forced


def replay(model: PreTrainedModel, recorded: list[list[list[int]]]) -> None:
    left, generate = iter(recorded), model.generate
    model.generate = lambda **inputs: generate(logits_processor=LogitsProcessorList([Replay(next(left))]), **inputs)


def assert_trains_as(ours: Run, default: Run, *more: str, rel: float = 1e-3) -> None:
    """The same loss and gradient norm, and other metrics, of a training that changes the weights."""
    for metric in ("loss", "grad_norm", *more):
        assert ours.metric(metric) == pytest.approx(default.metric(metric), rel=rel, abs=1e-6)
    assert max(default.metric("grad_norm")) > 1e-3


def assert_ratios_are_one(run: Run, tolerance: float = 1e-4) -> None:
    for statistic in ("min", "mean", "max"):
        found = run.metric(f"sampling/importance_sampling_ratio/{statistic}")
        assert found == pytest.approx([1] * len(found), abs=tolerance)
        assert found


def end_more_often(model: PreTrainedModel) -> None:
    """So that some samples end by themselves, and others are cut off."""
    with torch.no_grad():
        model.lm_head.weight[2] += 1.5 * model.lm_head.weight.std()


class BrokenForward:
    """The chosen forwards of the engine, counted from 0, fail; those of the trainer do not."""

    def __init__(self, manager: RolloutManager, broken: set[int]) -> None:
        self.seen = -1
        self._broken = broken
        runner = manager.engine.controller.runner
        self._forward = runner.forward
        runner.forward, runner.runs = self, None  # type: ignore[method-assign,assignment]

    def __call__(self, *args: Any) -> torch.Tensor:
        self.seen += 1
        if self.seen in self._broken:
            raise ValueError("broken layer")
        return self._forward(*args)


# --- the same as TRL's own generation ---------------------------------------------------------------------------------


def test_greedy_completions_loss_and_gradient_norm_are_the_default_paths(make_run):
    options = {"generation_kwargs": {"do_sample": False}, "entropy_coef": 0.1, "learning_rate": 0.3}
    default, ours = make_run("default", **options), make_run("attach", **options)
    for run in (default, ours):
        run.trainer.train()
    assert ours.marker.prompts == default.marker.prompts
    assert ours.marker.ids == default.marker.ids
    assert ours.marker.ids[0] != ours.marker.ids[1]
    assert_trains_as(ours, default, rel=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_samples_give_the_default_paths_loss_and_gradient_norm(make_run, masked):
    options = {"mask_truncated_completions": masked, "temperature": 0.8, "max_completion_length": 6}
    ours, default = make_run("attach", **options), make_run("default", **options)
    for run in (ours, default):
        end_more_often(run.model)
    ours.trainer.train()
    replay(default.model, ours.marker.ids)
    default.trainer.train()
    lengths = {len(row) for rows in ours.marker.ids for row in rows}
    assert len(lengths) > 1, "some samples end by themselves"
    assert ours.marker.ids == default.marker.ids
    assert ours.metric("completions/clipped_ratio") == default.metric("completions/clipped_ratio")
    assert_trains_as(ours, default)


def add_reference(run: Run, architecture: str = "qwen3") -> None:
    """A reference policy as TRL adds it, which it can only load from a folder."""
    run.trainer.beta, run.trainer.ref_model = 0.1, make_model(architecture, seed=1, num_hidden_layers=1).eval()
    trl.trainer.utils.add_fused_lm_head(run.trainer.ref_model, temperature=run.trainer.temperature)


@pytest.mark.parametrize("reference", [False, True])
def test_over_trees_loss_gradient_norm_and_entropy_are_the_default_paths(make_run, reference):
    options = {"temperature": 0.8, "max_completion_length": 6, "entropy_coef": 0.1, "cast_lm_head_to_fp32": True}
    if reference:
        options |= {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    ours, default = make_run("default", **options), make_run("default", **options)
    for run in (ours, default):
        end_more_often(run.model)
        if reference:
            add_reference(run)
    attach(ours.trainer, ours.manager, tree=True)
    seen = []
    ours.model.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: seen.append(len(inputs[0])) if module.training else None
    )
    ours.trainer.train()
    replay(default.model, ours.marker.ids)
    default.trainer.train()
    assert ours.marker.ids == default.marker.ids
    assert_trains_as(ours, default, "entropy", *["kl"] * reference)
    assert set(seen) == {1}, "one tree per forward"


def test_trees_take_no_unknown_inputs_and_detach_gives_the_model_back(make_run):
    run = make_run("default")
    before = dict(vars(run.trainer))
    with attach(run.trainer, run.manager, tree=True):
        assert run.model.config._attn_implementation == "rollout_tree_sdpa"
        with pytest.raises(ValueError, match="pixel_values: not followed over prefix trees and kept tokens"):
            run.trainer._get_per_token_logps_and_entropies(
                run.model, torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4), 2, pixel_values=torch.ones(1)
            )
    assert run.model.config._attn_implementation == "sdpa"
    assert vars(run.trainer) == before


# --- the correction by log-probs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_trls_importance_weights_come_from_our_log_probs_and_are_one(make_run, mode):
    run = make_run("attach", temperature=0.7, vllm_importance_sampling_mode=mode)
    run.trainer.train()
    assert_ratios_are_one(run)
    assert max(run.metric("sampling/sampling_logp_difference/max")) < 1e-4
    theirs = run.metric("sampling/sampling_logp_difference/mean")
    assert run.metric("rollout/logprob_diff_mean") == pytest.approx(theirs, abs=1e-7)


SHAPED = [{"top_k": 5}, {"top_p": 0.6}, {"repetition_penalty": 1.5}, {"generation_kwargs": {"min_tokens": 4}}]


@pytest.mark.filterwarnings("ignore:.*are drawn from another distribution:UserWarning")
@pytest.mark.parametrize("shape", SHAPED, ids=str)
def test_what_is_drawn_from_a_part_of_the_distribution_is_trained_on_as_by_default(make_run, shape):
    """Against log-probs of the part that was drawn from, weights of whole completions were 1e-40: nothing was learnt."""
    options = {"temperature": 0.8, "max_steps": 1} | shape
    ours, default = make_run("attach", replay=False, **options), make_run("default", **options)
    ours.trainer.train()
    replay(default.model, ours.marker.ids)
    default.trainer.train()
    assert ours.metric("sampling/importance_sampling_ratio/min") == pytest.approx([1], abs=1e-4)
    assert max(ours.metric("rollout/logprob_diff_max")) < 1e-4
    assert_trains_as(ours, default)


REPLAYED = [
    {"top_p": 0.6, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": GROUP},
    {"top_k": 5, "repetition_penalty": 1.5, "generation_kwargs": {"presence_penalty": 0.3}},
]


@pytest.mark.parametrize(("shape", "tree"), zip(REPLAYED, (False, True), strict=True), ids=str)
def test_truncated_sampling_has_ratio_one_and_its_log_probs_are_those_drawn_from(make_run, shape, tree):
    run = make_run("default", temperature=0.8, max_steps=2, **shape)
    if "top_k" in shape:
        add_reference(run)
    attachment = attach(run.trainer, run.manager, tree=tree)
    run.trainer.train()
    assert_ratios_are_one(run)
    assert max(run.metric("rollout/logprob_diff_max")) < 1e-4
    assert max(run.metric("grad_norm")) > 1e-3
    assert attachment.steps == 2
    attachment.detach()
    assert "_compute_loss" not in vars(run.trainer)
    assert run.model.config._attn_implementation == "sdpa"


def test_replay_is_refused_where_it_would_have_no_effect_and_left_out_with_a_warning_where_it_is_impossible(make_run):
    def tools(run):
        run.trainer.tools = [print]

    def aux_loss(run):
        run.trainer.aux_loss_enabled, run.trainer.router_aux_loss_coef = True, 0.001

    def liger_loss(run):
        run.trainer.args.use_liger_kernel, run.trainer.compute_liger_loss = True, print

    for options, change, named in (
        ({"top_p": 0.9}, tools, "with tools"), ({"top_p": 0.9}, aux_loss, r"router_aux_loss_coef=0\.001"),
        ({"top_k": 9}, liger_loss, "use_liger_kernel=True"), ({"top_k": 5000}, None, "top_k=5000: sets hold at most 4096"),
        ({}, None, "without top_k"), ({"top_k": 1}, None, "without top_k"),
    ):  # fmt: skip
        run = make_run("default", **options)
        if change is not None:
            change(run)
        with pytest.raises(ConfigError, match=named):
            attach(run.trainer, run.manager, replay=True)
        if options and options.get("top_k") != 1:
            with pytest.warns(UserWarning, match=f"not so here, .*{named}"):
                attachment = attach(run.trainer, run.manager)
            assert "_compute_loss" not in vars(run.trainer)
            attachment.detach()


ROUTED: list[tuple[dict[str, Any], bool]] = [
    ({"gradient_checkpointing": True, "steps_per_generation": 2, "gradient_accumulation_steps": 2,
      "per_device_train_batch_size": GROUP}, False),
    ({"gradient_checkpointing": True, "router_aux_loss_coef": 0.0, "reference": True}, True),
    ({"top_p": 0.6, "router_aux_loss_coef": 0.0, "gradient_checkpointing": False}, False),
    ({"top_k": 5, "router_aux_loss_coef": 0.0, "gradient_checkpointing": True}, True),
]  # fmt: skip


def routed_run(make_run: Maker, record: bool, tree: bool, **options: Any) -> tuple[Run, list[float]]:
    """A run whose routers choose otherwise while the rollout samples; and what the loss's first log-probs differ by."""
    reference = options.pop("reference", False)
    run = make_run("default", architecture="qwen3_moe", temperature=0.8, engine={"record_routes": record}, **options)
    if reference:
        add_reference(run, "qwen3_moe")
    attach(run.trainer, run.manager, tree=tree)
    generate, compute, logprobs = run.manager.generate, run.trainer._compute_loss, []
    of_rows, gaps = run.trainer._get_per_token_logps_and_entropies, []

    def sampling_otherwise(*args, **kwargs):
        with LowestExperts(run.model):
            return generate(*args, **kwargs)

    def watched_pass(*args, **kwargs):
        found = of_rows(*args, **kwargs)
        logprobs.append(found[0].detach())
        return found

    def watched_loss(model, inputs):
        loss = compute(model, inputs)
        gap = (logprobs[-1] - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()]
        gaps.append(float(gap.abs().max()))
        return loss

    run.manager.generate = sampling_otherwise
    run.trainer._get_per_token_logps_and_entropies, run.trainer._compute_loss = watched_pass, watched_loss
    run.trainer.train()
    return run, gaps


@pytest.mark.parametrize(("shape", "tree"), ROUTED, ids=str)
def test_recorded_routes_are_replayed_in_the_log_probs_of_the_loss_and_of_the_old_policy(make_run, shape, tree):
    run, gaps = routed_run(make_run, True, tree, **shape)
    assert_ratios_are_one(run, 1e-5)
    assert len(gaps) == 2 * shape.get("steps_per_generation", 1)
    assert max(gaps) < 1e-5, "the loss's own forward"
    assert max(run.metric("rollout/logprob_diff_max")) < 1e-5
    assert max(run.metric("grad_norm")) > 1e-3
    assert all("forward" not in vars(router) for router in routers_of(run.model).modules)


def test_without_recorded_routes_these_ratios_are_not_one(make_run):
    run, gaps = routed_run(make_run, False, False, max_steps=1)
    assert run.metric("sampling/importance_sampling_ratio/min")[0] < 0.99
    assert gaps[0] > 0.01


def test_recorded_routes_that_could_not_be_replayed_are_refused(make_run):
    run = make_run("default", architecture="qwen3_moe", engine={"record_routes": True})
    with pytest.raises(ConfigError, match=r"record_routes=True with replay=False: .*leave replay out"):
        attach(run.trainer, run.manager, replay=False)
    run.trainer.tools = [print]
    with pytest.raises(ConfigError, match="record_routes=True with tools"):
        attach(run.trainer, run.manager)
    run.trainer.tools, run.trainer.args.use_liger_kernel, run.trainer.compute_liger_loss = [], True, print
    with pytest.raises(ConfigError, match="record_routes=True with use_liger_kernel=True"):
        attach(run.trainer, run.manager)
    run.trainer.args.use_liger_kernel = False
    before = dict(vars(run.trainer))
    attach(run.trainer, run.manager, replay=True).detach()
    assert vars(run.trainer) == before
    with pytest.raises(ConfigError, match="record_routes=True: with a rollout_func TRL routes"):
        episode_rollout_func(run.manager, print)


def test_a_cut_distribution_is_named_with_the_cure_and_a_whole_one_is_not(make_run, recwarn):
    cut, whole = make_run("default", top_k=5, top_p=0.9), make_run("default", temperature=0.5)
    with pytest.warns(
        UserWarning, match=r"^top_k=5, top_p=0.9: completions are drawn from another .*\(top_k=0, "
    ) as told:
        attach(cut.trainer, cut.manager, replay=False)
    assert told[0].filename == __file__
    attach(whole.trainer, whole.manager)
    assert not [each for each in recwarn if "are drawn from" in str(each.message)]


def test_greedy_log_probs_are_at_the_trainers_temperature_and_the_correction_can_be_switched_off(make_run):
    for correction, expected in ((True, [1]), (False, [])):
        run = make_run(
            "attach", temperature=0.5, generation_kwargs={"do_sample": False}, max_steps=1,
            vllm_importance_sampling_correction=correction,
        )  # fmt: skip
        run.trainer.train()
        assert run.metric("sampling/importance_sampling_ratio/min") == pytest.approx(expected, abs=1e-4)
        assert run.manager.policy_version == 1


def test_under_bfloat16_autocast_we_sample_under_it_too(make_run):
    run = make_run("attach", bf16=True, vllm_importance_sampling_mode="token_truncate")
    run.trainer.train()
    assert run.metric("sampling/importance_sampling_ratio/mean") == pytest.approx([1, 1], abs=0.05)
    assert min(run.metric("rollout/logprob_diff_mean")) > 1e-4, "nothing was rounded"


# --- versions, memory, logs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": GROUP, "max_steps": 3},
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 4},
    ],
    ids=["accumulation", "iterations", "steps_per_generation"],
)
def test_the_version_is_the_number_of_optimizer_steps_and_the_cache_is_away_while_training(make_run, options):
    run = make_run("attach", **options)
    spy, sampled = Spy(run.manager), []
    run.trainer.add_callback(spy)
    generate = run.manager.generate

    def noting(*args: Any, **kwargs: Any) -> Any:
        batch = generate(*args, **kwargs)
        sampled.append(set(batch.policy_versions[batch.response_mask].tolist()))
        return batch

    run.manager.generate = noting
    run.trainer.train()
    assert run.manager.policy_version == run.trainer.state.global_step == options["max_steps"]
    assert sampled == [{step} for step in run.marker.steps]
    assert len(sampled) < options["max_steps"] or "gradient_accumulation_steps" in options
    assert all(version == step for step, version, _ in spy.seen)
    assert {state for *_, state in spy.seen} == {EngineState.SUSPENDED}
    assert run.metric("rollout/policy_version") == list(range(1, options["max_steps"] + 1))
    assert_nothing_leaked(run.manager)


def test_evaluation_generates_here_too_before_and_while_training(make_run):
    run = make_run("attach", num_generations_eval=2, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1)
    before = run.trainer.evaluate()
    run.trainer.train()
    assert run.manager.policy_version == 2
    assert before["eval_sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    evaluated = [rows for rows in run.marker.prompts if len(rows) == 4]
    assert len(evaluated) == 3 * 2
    assert all(rows[0::2] == rows[1::2] for rows in evaluated)
    assert len(run.metric("rollout/policy_version")) == 2


def test_conversations_are_templated_as_trl_does(make_run):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    options = {"prompts": chats, "generation_kwargs": {"do_sample": False}, "max_steps": 1}
    default, ours = make_run("default", **options), make_run("attach", **options)
    for run in (default, ours):
        run.trainer.train()
    assert ours.marker.ids == default.marker.ids
    assert ours.marker.completions == default.marker.completions
    assert ours.marker.completions[0][0][0]["role"] == "assistant"


def test_a_later_turn_of_trls_tool_loop_comes_here_too(make_run):
    run = make_run("attach")
    prompts = [[5, 6], [7], [5, 6], [5, 6]]
    completions, logprobs = run.trainer._generate_single_turn(prompts, None, {}, 1)
    assert len(completions) == 4
    assert [len(row) for row in logprobs] == [len(row) for row in completions]
    assert completions[2] != completions[3]


def test_detaching_gives_the_trainer_back(make_run):
    run = make_run("default")
    before = dict(vars(run.trainer))
    callbacks = list(run.trainer.callback_handler.callbacks)
    with attach(run.trainer, run.manager, on_error="mask"):
        assert run.trainer.use_vllm
    assert vars(run.trainer) == before
    run.trainer.train()
    assert run.manager.policy_version == 0
    before = dict(vars(run.trainer))
    with (
        attach_optimizer(run.trainer.optimizer, run.manager),
        pytest.raises(ValueError, match="attached to this rollout"),
    ):
        attach(run.trainer, run.manager)
    assert vars(run.trainer) == before
    assert run.trainer.callback_handler.callbacks == callbacks


def test_a_callback_of_ones_own_that_follows_the_optimizer_is_left_to_it(make_run):
    run = make_run("default")

    class Own(TrainerCallback):
        manager = run.manager

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.manager.weights_updated()

    run.trainer.add_callback(Own())
    attach(run.trainer, run.manager)
    run.trainer.train()
    assert run.manager.policy_version == 2


def test_a_resumed_training_goes_on_with_version_and_random_streams(make_run, tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    through = make_run("attach", **options)
    through.trainer.train()
    resumed = make_run("attach", **options)
    resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.marker.ids == through.marker.ids[1:]
    assert resumed.manager.policy_version == 2
    assert resumed.metric("rollout/policy_version") == [1, 2]


def test_resumed_from_a_checkpoint_without_us_the_version_is_the_trainers_step_and_a_warning_says_so(
    make_run, tmp_path
):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_run("default", **options).trainer.train()
    run = make_run("attach", **options)
    with pytest.warns(UserWarning, match=r"is at step 1, .*checkpoint-1: .* continues from 1, .* from the seed"):
        run.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert run.manager.policy_version == 2
    assert run.metric("rollout/policy_version") == [2]


def test_only_the_metrics_that_are_asked_for_join_the_logs(make_run):
    none, some, refused = (make_run("default", max_steps=1) for _ in range(3))
    attach(none.trainer, none.manager, log=False)
    attach(some.trainer, some.manager, log=["rollout/policy_version"])
    for run, names in ((none, set()), (some, {"rollout/policy_version"})):
        run.trainer.train()
        assert {name for entry in run.trainer.state.log_history for name in entry if "rollout/" in name} == names
    with pytest.raises(KeyError, match="did you mean rollout/policy_version"):
        attach(refused.trainer, refused.manager, log=["rollout/policy_versoin"])


def test_the_engine_does_not_see_the_forward_that_trl_trains_by(make_run):
    run = make_run("attach", max_steps=1)
    seen = []
    generate = run.manager.generate
    run.manager.generate = lambda *args, **kwargs: (
        seen.append("forward" in vars(run.model)),
        generate(*args, **kwargs),
    )[1]
    run.trainer.train()
    assert seen == [False]
    assert "forward" in vars(run.model)


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "sharded"), [("GRPO", True), ("RLOO", True), ("RLOO", False)])
def test_two_ranks_are_followed_under_ddp_and_under_fsdp2_that_shards_when_training_begins(
    nursery, tmp_path, algorithm, sharded
):
    for answer in run_together(nursery, 2, trl_jobs.trains, folder=str(tmp_path), algorithm=algorithm, sharded=sharded):
        assert (answer["version"], answer["steps"], answer["sharded"]) == (2, 2, sharded)
        assert answer["difference"] < 1e-5
        assert min(answer["grad_norm"]) > 1e-3


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_completion_stops_the_training_by_default(make_run):
    run = make_run("attach")
    BrokenForward(run.manager, {3})
    with pytest.raises(RolloutFailedError, match="broken layer"):
        run.trainer.train()
    assert not run.marker.ids
    assert run.manager.policy_version == 0


def test_a_masked_failure_is_out_of_the_loss_and_out_of_its_groups_baseline(make_run):
    run = make_run("attach", on_error="mask", max_steps=1, num_generations=8, per_device_train_batch_size=16)
    end_more_often(run.model)
    BrokenForward(run.manager, {9})
    kept: dict[str, Any] = {}
    score = run.trainer._generate_and_score_completions
    run.trainer._generate_and_score_completions = lambda inputs: kept.update(score(inputs)) or dict(kept)
    run.trainer.train()
    failed = kept["tool_mask"][:, 0] == 0
    assert {tuple(ids) for ids, lost in zip(run.marker.ids[0], failed, strict=True) if lost} == {(2,)}
    advantages, survived = kept["advantages"].view(-1, 8), ~failed.view(-1, 8)
    assert any(2 <= count < 8 for count in survived.sum(1).tolist()), "some of a group have failed"
    assert (advantages[~survived] == 0).all()
    assert advantages.sum(1).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert advantages[survived].abs().max() > 0.1
    assert 0 < run.metric("grad_norm")[0] < math.inf
    assert run.manager.policy_version == 1


# --- what is refused, and how it is said ------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"use_vllm": True}, {}, ValueError, "set GRPOConfig.use_vllm=False"),
    ({"use_transformers_continuous_batching": True}, {}, ValueError, "use_transformers_continuous_batching=False"),
    ({"rollout_func": print}, {}, ValueError, "has a rollout_func already"),
    ({"tools": [print]}, {"on_error": "mask"}, ValueError, "has 1 tools"),
    ({"reward_funcs": [lambda samples: [0.0]]}, {}, TypeError, r"<lambda>\(samples\) .*TRL calls it with completion_ids"),
    ({"aux_loss_enabled": True, "router_aux_loss_coef": 0.001}, {"tree": True}, ConfigError, r"loss_coef=0\.001"),
    ({}, {"mode": "fast"}, ConfigError, r"mode='fast'.*'persist', 'offload', 'recompute'"),
    ({}, {"on_error": "skip"}, ConfigError, "on_error='skip'"),
    ({"args.scale_rewards": "batch"}, {"keep": rewards_differ}, ConfigError, "scale_rewards='batch'"),
    ({"args.multi_objective_aggregation": "normalize_then_sum"}, {"keep": rewards_differ}, ConfigError, "sum_then_norm"),
    ({"args.per_device_train_batch_size": 3}, {"keep": rewards_differ}, ConfigError, "multiple of num_generations=4"),
    *(({"args.generation_kwargs": {name: 4}}, {}, ConfigError, rf"\['{name}'\]=4: this rollout cannot do it")
      for name in ("num_beams", "n", "seed", "eos_token_id")),
]  # fmt: skip
"""Attributes of the trainer, options of `attach`, the error."""


def test_what_cannot_be_attached_is_refused_by_name(make_run):
    run = make_run("default")
    for attributes, options, error, message in REFUSED:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in attributes.items():
                owner = run.trainer.args if name.startswith("args.") else run.trainer
                patch.setattr(owner, name.removeprefix("args."), value, raising=False)
            before = dict(vars(run.trainer))
            with pytest.raises(error, match=message):
                attach(run.trainer, run.manager, **options)
            assert vars(run.trainer) == before
    with pytest.raises(TypeError, match="Run is not a Trainer"):
        attach(run, run.manager)
    with pytest.raises(ValueError, match=r"trains another Qwen3ForCausalLM .*RolloutManager\(trainer.model"):
        attach(run.trainer, make_run("default").manager)
    attachment = attach(run.trainer, run.manager)
    with pytest.raises(ValueError, match="attached to a rollout already"):
        attach(run.trainer, run.manager)
    with pytest.raises(ValueError, match="images"):
        attachment.generate([[1]], [["image"]], 1)


def test_vespo_is_corrected_by_token_whatever_grpo_config_says(make_run):
    run = make_run("default", loss_type="vespo")
    with pytest.warns(UserWarning, match="'sequence_mask': loss_type='vespo' is corrected token by token"):
        attachment = attach(run.trainer, run.manager)
    run.trainer.train()
    assert run.metric("sampling/importance_sampling_ratio/mean") == pytest.approx([1, 1], abs=1e-4)
    assert min(run.metric("grad_norm")) > 1e-3
    attachment.detach()
    assert run.trainer.vllm_importance_sampling_mode == "sequence_mask"


def test_sampling_is_what_grpo_config_says(make_run):
    run = make_run("default", temperature=0.9, top_p=0.8, top_k=7, min_p=0.1, repetition_penalty=1.2)
    params = sampling_params(run.trainer)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.9, 0.8, 7, 0.1)
    assert (params.repetition_penalty, params.max_tokens) == (1.2, 10)
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((2,), True, 0)
    run.trainer.args.generation_kwargs = {"min_new_tokens": 3, "presence_penalty": 0.5, "stop_token_ids": [40]}
    params = sampling_params(run.trainer)
    assert (params.min_tokens, params.presence_penalty, params.stop_token_ids) == (3, 0.5, (2, 40))
    run.trainer.args.generation_kwargs = {"do_sample": False}
    params = sampling_params(run.trainer)
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (1, 1.0, 0.0, 0.9)


# --- groups that are worth training on --------------------------------------------------------------------------------


class EqualOnce:
    """A reward function: all samples of a prompt with an even number of tokens are equal, and others differ."""

    __name__ = "equal_once"

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def __call__(self, prompts, completion_ids, **columns: Any) -> list[float]:
        self.rounds.append(len(prompts))
        return [float(row % 3) * (len(prompt) % 2) for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7, "vllm_importance_sampling_mode": "sequence_mask"}], ids=str)
def test_groups_of_equal_rewards_are_replaced_by_other_prompts(make_run, options):
    prompts = ["abc", "hello there", "xy", "1234", "5", "even"]
    run = make_run("default", prompts=prompts, max_steps=4, **options)
    reward = EqualOnce()
    run.trainer.reward_funcs = [reward]
    attachment = attach(run.trainer, run.manager, keep=rewards_differ)
    batches: list[dict[str, Any]] = []
    full = run.trainer._generate_and_score_completions
    run.trainer._generate_and_score_completions = lambda inputs: batches.append(full(inputs)) or batches[-1]
    run.trainer.train()
    run.trainer._generate_and_score_completions = full
    assert len(batches) == 4 < len(reward.rounds)
    assert attachment.discarded >= len(reward.rounds) - 4
    for batch in batches:
        advantages = batch["advantages"].view(-1, GROUP)
        assert len(advantages) == 2
        assert (advantages != 0).any(1).all()
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
        for number in range(2 * GROUP):
            tokens = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()]
            assert len(tokens) % 2, "the prompt of a group that differs"
    # What was joined is what was sampled: its log-probs are those of the trainer.
    assert max(run.metric("rollout/logprob_diff_max")) < 1e-4
    assert min(run.metric("grad_norm")) > 1e-3
    attachment.detach()
    assert "_calculate_rewards" not in vars(run.trainer)
