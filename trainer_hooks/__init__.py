"""Integrations with training frameworks, one per module.

Hooks on the optimizer's step raise the policy version, so the training loop need not call anything. This package imports
nothing, so using one integration does not import the other frameworks.
"""
