"""The rollout side with the real Ray, the real vLLM and a tiny random model: what the training loop relies on."""

import os
import signal
import time
from dataclasses import dataclass

import psutil
import pytest
import ray
import torch

from megarl.platform.rollout_env import ray_cluster
from megarl.rollout.engine import EngineConfig
from megarl.rollout.fleet import EngineFailure, Fleet, Timeouts
from megarl.rollout.sampling import Sampling
from megarl.sync.transport import GlooSender, Manifest

pytestmark = pytest.mark.system

VOCABULARY = 128
EOS = 2
TOLERANCE = 1e-4
MAX_LEN = 192
NOT_A_NUMBER = 2


@dataclass(frozen=True)
class Tokens:
    token_ids: tuple[int, ...]


def prompt(index, length=None):
    return Tokens(tuple(3 + (index * 7 + j * j + 3 * j) % 100 for j in range(length or 5 + index % 9)))


PROMPTS = [prompt(i) for i in range(12)]
LONG = Sampling(1.0, 24, ())


def make_model(folder, seed):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


class Sender:
    """Stands for trainer rank 0: holds the weights of the models, and a set that gives NaN, and sends one of them."""

    def __init__(self, folders):
        from transformers import Qwen3ForCausalLM

        self.weights = [list(Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()) for folder in folders]
        # NaN in the last norm only: further down it would stay in the KV cache.
        factor = {"model.norm.weight": float("nan")}
        self.weights.append([(name, weight.detach() * factor.get(name, 1.0)) for name, weight in self.weights[0]])
        self.sender = GlooSender(bucket_bytes=50_000, timeout_s=20.0)

    def manifest(self):
        return Manifest.of(self.weights[0])

    def connect(self, host, port, world_size):
        self.sender.connect(host, port, world_size)

    def send(self, which):
        self.sender.send(self.manifest(), iter(self.weights[which]))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [(str(root / name), make_model(root / name, seed)) for seed, name in enumerate(("first", "second"))]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster():
        yield


def engine_config(models, **changes):
    return EngineConfig(**{"model": models[0][0], "max_model_len": MAX_LEN, "max_num_seqs": 64, "version": 5} | changes)


@pytest.fixture(scope="module")
def sender(cluster, models):
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])  # where the actor finds this module
    remote = ray.remote(Sender).options(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}})
    return remote.remote([folder for folder, _ in models])


@pytest.fixture(scope="module")
def fleet(cluster, models, sender):
    """Two engines, connected to the sender, holding the first model's weights."""
    fleet = Fleet.start(engine_config(models), 2, timeouts=Timeouts(start=240, generate=60, sync=60, call=30))
    fleet.connect_weights(lambda host, port, size: [sender.connect.remote(host, port, size)], bucket_bytes=50_000)
    yield fleet
    fleet.shutdown()


def sync(fleet, sender, which, version, **options):
    fleet.sync_weights(lambda: [sender.send.remote(which)], ray.get(sender.manifest.remote()), version, **options)


def reference_logprobs(model, tokens, response, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens) + response])).logits[0] / temperature
    rows = logits.log_softmax(-1)[len(tokens) - 1 : -1]
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0]


def largest_difference(model, prompts, responses, temperature=1.0):
    def difference(r):
        return reference_logprobs(model, prompts[r.prompt_index].token_ids, r.token_ids, temperature) - torch.tensor(r.logprobs)

    return max(difference(response).abs().max().item() for response in responses)


def plain(responses):
    return [(r.token_ids, r.logprobs) for r in responses]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(fleet, sender, models, temperature):
    sync(fleet, sender, 0, 6)
    responses = fleet.generate(PROMPTS, 2, Sampling(temperature, 24, ()), step=1, seed=0)
    assert largest_difference(models[0][1], PROMPTS, responses, temperature) < TOLERANCE


def test_responses_are_ordered_and_those_of_a_group_differ(fleet):
    responses = fleet.generate(PROMPTS, 4, LONG, step=1, seed=0)
    assert [(r.prompt_index, r.sample_index) for r in responses] == [(p, s) for p in range(len(PROMPTS)) for s in range(4)]
    assert len({tuple(r.token_ids) for r in responses}) == len(responses)


def test_a_sync_replaces_the_weights_of_every_engine(fleet, sender, models):
    sync(fleet, sender, 0, 7)
    before = fleet.generate(PROMPTS, 1, LONG, step=1, seed=0)
    sync(fleet, sender, 1, 8)
    after = fleet.generate(PROMPTS, 1, LONG, step=1, seed=0)
    for engine in range(len(fleet)):  # prompts go to engines in turn
        assert largest_difference(models[0][1], PROMPTS, before[engine::2]) < TOLERANCE
        assert largest_difference(models[1][1], PROMPTS, after[engine::2]) < TOLERANCE
        assert largest_difference(models[0][1], PROMPTS, after[engine::2]) > 0.1  # had the sync been skipped
    assert {span for r in before for span in r.versions} == {(7, 0, 24)}
    assert {span for r in after for span in r.versions} == {(8, 0, 24)}
    assert [engine["version"] for engine in fleet.health()] == [8, 8]


def test_a_sync_empties_the_prefix_cache(fleet, sender, models):
    """Long prompts that share whole KV blocks: what old weights left in the cache must not be used by new ones."""
    long = [prompt(1, 150), prompt(1, 150)]
    sync(fleet, sender, 0, 9)
    first = fleet.generate(long, 3, LONG, step=1, seed=0)
    assert largest_difference(models[0][1], long, first) < TOLERANCE
    sync(fleet, sender, 1, 10)
    second = fleet.generate(long, 3, LONG, step=1, seed=0)
    assert largest_difference(models[1][1], long, second) < TOLERANCE


def test_the_same_seed_gives_the_same_tokens_and_logprobs_to_the_bit(fleet, sender):
    sync(fleet, sender, 0, 11)
    first = fleet.generate(PROMPTS, 3, LONG, step=4, seed=9)
    fleet.generate([prompt(5, 140)] * 3, 5, Sampling(1.0, 10, ()), step=0, seed=1)  # other work in between
    again = fleet.generate(PROMPTS, 3, LONG, step=4, seed=9)
    assert plain(first) == plain(again)
    assert plain(first) == plain([r for _, group in sorted(fleet.stream(PROMPTS, 3, LONG, step=4, seed=9)) for r in group])
    assert plain(first) != plain(fleet.generate(PROMPTS, 3, LONG, step=4, seed=10))
    assert plain(first) != plain(fleet.generate(PROMPTS, 3, LONG, step=5, seed=9))


def test_responses_end_at_a_stop_token_or_the_length(fleet, sender, models):
    sync(fleet, sender, 0, 12)
    stops = (*range(0, VOCABULARY, 8), EOS)
    responses = fleet.generate(PROMPTS, 8, Sampling(1.0, 6, stops), step=1, seed=0)
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for r in responses:
        assert len(r.logprobs) == len(r.token_ids) <= 6
        assert not set(r.token_ids[:-1]) & set(stops)
        assert (r.token_ids[-1] in stops) == (r.finish_reason == "stop")
        assert r.finish_reason == "stop" or len(r.token_ids) == 6
    assert largest_difference(models[0][1], PROMPTS, responses) < TOLERANCE
    # The folder's own end-of-sequence token stops nothing unless asked for.
    free = fleet.generate(PROMPTS, 8, Sampling(2.0, 150, ()), step=1, seed=0)
    assert {r.finish_reason for r in free} == {"length"} and any(EOS in r.token_ids[:-1] for r in free)


def test_prompts_come_as_they_are_done(fleet):
    sampling = Sampling(1.0, 40, tuple(range(0, VOCABULARY, 8)))
    seen = [(index, len(group)) for index, group in fleet.stream(PROMPTS, 2, sampling, step=1, seed=3)]
    assert sorted(seen) == [(index, 2) for index in range(len(PROMPTS))]
    assert seen != sorted(seen)


def test_more_requests_than_fit_are_all_answered(fleet, sender, models):
    sync(fleet, sender, 0, 13)
    many = [prompt(i, 60 + i % 40) for i in range(60)]
    responses = fleet.generate(many, 4, Sampling(1.0, 60, ()), step=2, seed=2)
    assert len(responses) == 240
    assert largest_difference(models[0][1], many, responses[::16]) < TOLERANCE
    assert plain(responses) == plain(fleet.generate(many, 4, Sampling(1.0, 60, ()), step=2, seed=2))


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_may_change_in_flight_and_versions_say_where(fleet, sender, models, recompute):
    sync(fleet, sender, 0, 20)
    fleet.pause()
    stream = fleet.stream(PROMPTS[:2], 1, Sampling(1.0, 160, ()), step=1, seed=0)
    fleet.resume()
    time.sleep(0.15)
    fleet.pause()
    sync(fleet, sender, 1, 21, recompute_running=recompute)
    fleet.resume()
    for index, (response,) in stream:
        assert response.mixed_versions
        (_, start, middle), (_, same, end) = response.versions
        assert [v for v, _, _ in response.versions] == [20, 21] and (start, same, end) == (0, middle, 160)
        tokens, logprobs = PROMPTS[index].token_ids, torch.tensor(response.logprobs)
        old = (reference_logprobs(models[0][1], tokens, response.token_ids) - logprobs).abs()
        new = (reference_logprobs(models[1][1], tokens, response.token_ids) - logprobs).abs()
        assert old[:middle].max() < TOLERANCE and old[middle:].max() > 0.1
        # Recomputed, the KV cache is the new weights' own; kept, the old prefix still speaks.
        assert (new[middle:].max() < TOLERANCE) == recompute


def test_abort_gives_what_there_is(fleet, sender, models):
    sync(fleet, sender, 0, 22)
    stream = fleet.stream(PROMPTS[:4], 2, Sampling(1.0, 170, ()), step=1, seed=0)
    time.sleep(0.15)
    fleet.abort()
    responses = [r for _, group in sorted(stream) for r in group]
    assert len(responses) == 8 and {r.finish_reason for r in responses} == {"abort"}
    assert all(len(r.logprobs) == len(r.token_ids) < 170 for r in responses)
    assert largest_difference(models[0][1], PROMPTS, [r for r in responses if r.token_ids]) < TOLERANCE
    assert [engine["unfinished"] for engine in fleet.health()] == [0, 0]


def test_a_log_prob_that_is_not_a_number_names_the_request(fleet, sender):
    sync(fleet, sender, NOT_A_NUMBER, 23)
    message = r"rollout engine \d failed during generation: .*log-prob nan to token 0 .* of sample 0 of prompt \d"
    with pytest.raises(EngineFailure, match=message):
        fleet.generate(PROMPTS, 1, LONG, step=1, seed=0)
    sync(fleet, sender, 0, 24)
    assert len(fleet.generate(PROMPTS, 1, LONG, step=1, seed=0)) == len(PROMPTS)  # the engine itself is well


def test_an_engine_that_dies_is_named_within_the_timeout(fleet, sender):
    """Must be the last one with this fleet."""
    pids = [engine["pid"] for engine in fleet.health()]
    stream = fleet.stream([prompt(i) for i in range(40)], 4, Sampling(1.0, 170, ()), step=1, seed=0)
    time.sleep(0.1)
    start = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineFailure, match="rollout engine 1 died during generation") as caught:
        list(stream)
    assert caught.value.engine == 1 and time.monotonic() - start < 30

    with pytest.raises(EngineFailure, match="rollout engine 1 died during the sync of weights version 30"):
        sync(fleet, sender, 0, 30)
    assert time.monotonic() - start < 60
    with pytest.raises(EngineFailure, match="rollout engine 1 died when asked for its health"):
        fleet.health()
    fleet.shutdown()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=15)
    assert not alive
