"""token_statistics against log_softmax and its autograd: values, gradients, tensor ranks, and the memory it is there to save."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megarl.models import logprobs
from megarl.models.logprobs import token_statistics
from megarl.objectives import taxonomy

N, HIDDEN, ROWS = 7, 6, 16


def inputs(dtype=torch.float32, vocab=ROWS, scale=3.0):
    """hidden [7, 6], weight [16, 6], labels [7], and weights [2, 7] of the log-probs and entropies in a loss."""
    torch.manual_seed(0)
    hidden = (scale * torch.randn(N, HIDDEN)).to(dtype).requires_grad_()
    weight = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (N,)), torch.randn(2, N, dtype=torch.float64)


def plain(hidden, weight, labels, temperature, vocab):
    """(log-probs, entropies, collisions, sum p^2 ln p) by way of all logits, and in float64 after the product."""
    logp = torch.log_softmax((hidden @ weight.t())[:, :vocab].double() / temperature, -1)
    p = logp.exp()
    return logp.gather(1, labels[:, None])[:, 0], -(p * logp).sum(1), p.square().sum(1), (p.square() * logp).sum(1)


def gradients(logp, entropy, weights, *of):
    return torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), of)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [11, 16])
def test_values_and_gradients(chunk, temperature, vocab):
    hidden, weight, labels, weights = inputs(vocab=vocab)
    got = token_statistics(
        hidden, weight, labels, temperature=temperature, vocab_size=vocab, entropy=True, collision=True, chunk_tokens=chunk
    )
    want = plain(hidden, weight, labels, temperature, vocab)
    for name, value in zip(("logp", "entropy", "collision", "collision_log"), want):
        found = getattr(got, name)
        assert found.dtype == torch.float32 and found.shape == (N,)
        torch.testing.assert_close(found.double(), value, atol=3e-6, rtol=3e-6)
    assert not got.collision.requires_grad and not got.collision_log.requires_grad
    found = gradients(got.logp, got.entropy, weights, hidden, weight)
    for grad, value in zip(found, gradients(*want[:2], weights, hidden, weight)):
        torch.testing.assert_close(grad, value, atol=2e-5, rtol=1e-4)
    assert (found[1][vocab:] == 0).all()


@pytest.mark.parametrize("chunk", [2, 7])
def test_gradients_of_each_output_alone(chunk):
    hidden, weight, labels, _ = inputs(torch.float64, vocab=13, scale=1.0)

    def outputs(hidden, weight):
        out = token_statistics(hidden, weight, labels, temperature=0.7, vocab_size=13, entropy=True, chunk_tokens=chunk)
        return out.logp, out.entropy

    assert torch.autograd.gradcheck(outputs, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *x: outputs(*x)[0], (hidden, weight))
    assert torch.autograd.gradcheck(lambda *x: outputs(*x)[1], (hidden, weight))


def test_only_what_is_asked_for():
    hidden, weight, labels, _ = inputs()
    out = token_statistics(hidden, weight, labels)
    assert out.logp.requires_grad and out.entropy is out.collision is out.collision_log is None
    assert token_statistics(hidden, weight, labels, collision=True).entropy is None
    with torch.no_grad():
        assert not token_statistics(hidden, weight, labels, entropy=True).entropy.requires_grad


@pytest.mark.parametrize("chunk", [2, 7])
def test_bf16_multiplies_in_bf16_and_does_the_rest_in_fp32(chunk):
    hidden, weight, labels, weights = inputs(torch.bfloat16)
    out = token_statistics(hidden, weight, labels, entropy=True, chunk_tokens=chunk)
    assert out.logp.dtype == out.entropy.dtype == torch.float32
    want = plain(hidden, weight, labels, 1.0, ROWS)  # its logits too are rounded to bf16, and nothing after them
    torch.testing.assert_close(out.logp.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.entropy.double(), want[1], atol=1e-5, rtol=1e-5)
    found = gradients(out.logp, out.entropy, weights, hidden, weight)
    for grad, value in zip(found, gradients(*want[:2], weights, hidden, weight)):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.float(), value.float(), atol=2**-8 * float(value.abs().max()), rtol=2**-7)


def test_the_weights_gradient_is_summed_in_fp32():
    """1 and then many parts of 2^-9 each: in bf16 every addition of a part would be rounded away."""
    hidden = torch.full((257, 1), 2.0**-9, dtype=torch.bfloat16)
    hidden[0] = 1.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp = token_statistics(hidden, weight, torch.zeros(257, dtype=torch.long), chunk_tokens=1).logp
    (grad,) = torch.autograd.grad(logp.sum(), weight)
    assert grad[:, 0].tolist() == [0.75, -0.75]  # half of 1 + 256 / 512


def test_extreme_logits_stay_finite_and_exact():
    hidden = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    out = token_statistics(hidden, torch.eye(3), torch.tensor([1, 2]), entropy=True, collision=True)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert all(x.isfinite().all() for x in (out.logp, out.entropy, out.collision, out.collision_log, hidden.grad))
    assert out.logp[0] == -2e4 and out.collision[0] == 1.0 and out.collision_log[0] == 0.0


def test_the_taxonomy_needs_nothing_more():
    hidden, weight, labels, _ = inputs()
    out = token_statistics(hidden, weight, labels, entropy=True, collision=True)
    logits = (hidden @ weight.t()).detach()
    collision, _ = taxonomy.collision_and_entropy(logits)
    torch.testing.assert_close(out.collision.double(), collision, atol=1e-6, rtol=1e-6)
    advantage = torch.linspace(-1, 1, N)
    p_s = out.logp.detach().exp()
    change = -advantage * (p_s * (out.logp + out.entropy).detach() - (out.collision_log + out.entropy * out.collision).detach())
    torch.testing.assert_close(change, taxonomy.entropy_change(logits.softmax(-1), labels, advantage), atol=1e-6, rtol=1e-5)


def peak_bytes(work):
    """Most bytes that torch held at once during `work`, over what it held before."""
    work()  # what is made at first use only
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("entropy", [True, False])
def test_two_chunks_of_logits_are_the_most_that_is_held(tokens, entropy):
    rows, chunk = 5000, 16
    hidden, weight = torch.randn(tokens, 1, requires_grad=True), torch.randn(rows, 1, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)

    def work():
        out = token_statistics(hidden, weight, labels, entropy=entropy, collision=True, chunk_tokens=chunk)
        torch.autograd.grad((out.logp + out.entropy if entropy else out.logp).sum(), (hidden, weight))

    # Beside them, a few numbers per token and row.
    assert 2 <= peak_bytes(work) / (4 * chunk * rows) < 2.5


def test_the_default_chunk_fills_the_given_bytes(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 5000 * 6 - 1)  # not quite six
    hidden, weight, labels = torch.randn(64, 1), torch.randn(5000, 1), torch.zeros(64, dtype=torch.long)
    assert 2 * 5 <= peak_bytes(lambda: token_statistics(hidden, weight, labels, entropy=True)) / (4 * 5000) < 2 * 6


VOCAB_OF_RANKS = 21
"""Of three tensor ranks with 16 rows each: 16 tokens, 5 tokens, none."""


def _rank(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=3)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hidden = torch.randn(N, HIDDEN, dtype=torch.float64).mul_(3).float().requires_grad_()
    weight = torch.randn(3 * ROWS, HIDDEN, requires_grad=True)
    labels, weights = torch.tensor([0, 5, 15, 16, 20, 17, 3]), torch.randn(2, N)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    want = plain(hidden, weight, labels, 0.8, VOCAB_OF_RANKS)
    want_grads = gradients(*want[:2], weights, hidden, weight)
    for reduce in (True, False):
        own = weight.detach()[mine].requires_grad_()
        got = token_statistics(
            hidden,
            own,
            labels,
            temperature=0.8,
            vocab_size=VOCAB_OF_RANKS,
            group=dist.group.WORLD,
            entropy=True,
            collision=True,
            chunk_tokens=3,
            reduce_hidden_grad=reduce,
        )
        for name, value in zip(("logp", "entropy", "collision", "collision_log"), want):
            torch.testing.assert_close(getattr(got, name).double(), value, atol=3e-6, rtol=3e-6)
        grad_hidden, grad_weight = gradients(got.logp, got.entropy, weights, hidden, own)
        torch.testing.assert_close(grad_weight, want_grads[1][mine], atol=2e-5, rtol=1e-4)
        if not reduce:
            assert rank < 2 or not grad_hidden.any()
            dist.all_reduce(grad_hidden)
        torch.testing.assert_close(grad_hidden, want_grads[0], atol=2e-5, rtol=1e-4)
    dist.destroy_process_group()


def test_tensor_ranks_agree_with_one(tmp_path):
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=3)
