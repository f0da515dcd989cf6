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
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
    kinds = {
        "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config(**base, head_dim=16, tie_word_embeddings=True)),
        "qwen3_untied": (Qwen3ForCausalLM, Qwen3Config(**base, head_dim=16, tie_word_embeddings=False)),
        "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**base, tie_word_embeddings=True)),
        "llama_untied": (LlamaForCausalLM, LlamaConfig(**base, tie_word_embeddings=False)),
    }
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, (cls, config) in kinds.items():
        model = cls(config)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    return {name: folder / name for name in kinds}
