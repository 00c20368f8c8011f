"""Inference engines: vLLM over HTTP, with the policy's weights.

Read engine.py first, then vllm.py.
"""
