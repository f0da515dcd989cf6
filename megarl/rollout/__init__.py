"""Prompts in, responses out: vLLM engines in Ray actors, and the fleet that routes prompts and weights to them."""
