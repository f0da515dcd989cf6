"""Prompts in, verdicts out: data files, tokenised prompts, the prompt stream and the verifiers."""
