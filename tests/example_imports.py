"""Imports of the examples: a nursery of this module forks processes that have them already; importing takes seconds."""
# ruff: noqa: F401

import matplotlib.pyplot
import wandb.sdk.launch

import rollout.engine.engine
import rollout.manager.manager
import rollout.server.server
import trainer_hooks.wandb
