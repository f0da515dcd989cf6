import pytest

from megarl.platform.rollout_env import ray_cluster


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster():
        yield


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Random Hugging Face folders by name: 4 layers, hidden 64, norms off their initial ones so that a lost one shows."""
    import torch
    import transformers
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    base = {
        "vocab_size": 125,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.05,
        "eos_token_id": 1,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    kinds = {
        "qwen3_tied": Qwen3Config(**base, head_dim=16, tie_word_embeddings=True),
        "qwen3_untied": Qwen3Config(**base, head_dim=16, tie_word_embeddings=False),
        "qwen2_tied": Qwen2Config(**base, tie_word_embeddings=True),
        "llama_untied": LlamaConfig(**base, tie_word_embeddings=False),
        "experts": Qwen3MoeConfig(**base, **experts, head_dim=16, tie_word_embeddings=False, norm_topk_prob=True),
        "experts_unnormalized": Qwen3MoeConfig(**base, **experts, head_dim=16, tie_word_embeddings=True, norm_topk_prob=False),
    }
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, config in kinds.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    return {name: folder / name for name in kinds}
