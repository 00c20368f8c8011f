"""Inference engines: vLLM, asked over HTTP, with the weights of the policy.

Read engine.py first, then vllm.py.
"""
