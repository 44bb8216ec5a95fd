"""Integrations with training frameworks, one per module.

Hooks on the optimizer's step increase the policy version, so the training loop need not announce updates. This package
imports nothing, so using one integration does not import the other frameworks.
"""
