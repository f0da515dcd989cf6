"""The policy as a Megatron model: from a Hugging Face folder, to one, and its log-probs."""
