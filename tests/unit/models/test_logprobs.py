"""token_logprobs equals log_softmax and its autograd, on one rank; tests/parallel has the ranks."""

import pytest
import torch

from megarl.models.logprobs import token_logprobs


def reference(logits, labels, temperature, vocab):
    logp = torch.log_softmax(logits[:, :vocab].double() / temperature, -1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [11, 16])
def test_values_and_gradients(temperature, vocab):
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 16)).requires_grad_()
    labels = torch.randint(0, vocab, (7,))
    weights = torch.randn(2, 7)
    logp, entropy = token_logprobs(logits, labels, temperature=temperature, vocab_size=vocab)
    want_logp, want_entropy = reference(logits, labels, temperature, vocab)
    torch.testing.assert_close(logp.double(), want_logp, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-6, rtol=1e-6)
    (got,) = torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), logits)
    (want,) = torch.autograd.grad((weights[0] * want_logp + weights[1] * want_entropy).sum(), logits)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (got[:, vocab:] == 0).all()


def test_the_logits_are_not_changed():
    logits = torch.randn(3, 8)
    before = logits.clone()
    token_logprobs(logits, torch.zeros(3, dtype=torch.long), vocab_size=5)
    assert torch.equal(logits, before)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    logp, entropy = token_logprobs(logits, torch.tensor([1, 2]))
    (logp.sum() + entropy.sum()).backward()
    assert logp.isfinite().all() and entropy.isfinite().all() and logits.grad.isfinite().all()
    assert logp[0] == -2e4


def test_bf16_logits_give_float32():
    logp, _ = token_logprobs(torch.randn(2, 8, dtype=torch.bfloat16), torch.tensor([1, 2]), entropy=False)
    assert logp.dtype == torch.float32
