"""Integrations with training frameworks, one per module.

The policy version is raised by hooks on the optimizer's step, not by explicit calls in the training loop. This package
imports nothing, so that an integration costs only its own framework.
"""
