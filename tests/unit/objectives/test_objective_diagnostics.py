"""Promise: the diagnostics of the value model tell what they say."""

import math

import pytest
import torch

from megarl.objectives import diagnostics as d


def tensor(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_explained_variance():
    returns = tensor(0.0, 1.0, 0.0, 1.0)
    assert d.explained_variance(returns, returns) == pytest.approx(1)
    assert d.explained_variance(torch.full((4,), 0.5), returns) == pytest.approx(0)
    assert d.explained_variance(returns + 3, returns) == pytest.approx(1)
    assert d.explained_variance(1 - returns, returns) == pytest.approx(-3)
    assert d.explained_variance(returns, torch.ones(4)) is None


def test_a_critic_that_only_knows_the_prompt_explains_nothing_within_it():
    returns, prompt = tensor(0.0, 1.0, 1.0, 1.0), torch.tensor([0, 0, 1, 1])
    by_prompt = tensor(0.5, 0.5, 1.0, 1.0)
    assert d.explained_variance(by_prompt, returns) > 0.3
    assert d.within_prompt_explained_variance(by_prompt, returns, prompt) == pytest.approx(0)
    assert d.within_prompt_explained_variance(returns, returns, prompt) == pytest.approx(1)
    assert d.within_prompt_explained_variance(by_prompt, tensor(1.0, 1.0, 0.0, 0.0), prompt) is None


def test_critic_against_the_free_baseline():
    reward, group = tensor(1.0, 0.0, 1.0, 1.0, 5.0), torch.tensor([0, 0, 0, 0, 1])
    others = tensor(2 / 3, 1.0, 2 / 3, 2 / 3, 0.0)
    assert d.error_against_group_baseline(others, reward, group, 2) == pytest.approx(1)
    assert d.error_against_group_baseline(reward, reward, group, 2) == 0
    assert d.error_against_group_baseline(1 - reward, reward, group, 2) > 1
    assert d.error_against_group_baseline(tensor(0.0), tensor(1.0), torch.tensor([0]), 1) is None


def test_bins():
    table = d.binned_error(tensor(1.0, 0.0, 0.5), tensor(0.0, 0.0, 1.0), torch.tensor([0, 0, 2]), 3)
    assert table["bias"][[0, 2]].tolist() == [0.5, -0.5] and bool(table["bias"][1].isnan())
    assert table["rmse"][0] == pytest.approx(math.sqrt(0.5)) and table["tokens"].tolist() == [2, 0, 1]
    assert d.relative_position_bins(torch.tensor([0, 4, 9]), torch.tensor([10, 10, 10])).tolist() == [0, 4, 9]
    assert d.log2_position_bins(torch.tensor([0, 1, 2, 3, 4, 1023, 1024])).tolist() == [0, 1, 2, 2, 3, 10, 11]


def test_calibration():
    values = tensor(0.1, 0.1, 0.9, 0.9)
    assert d.expected_calibration_error(values, tensor(0.1, 0.1, 0.9, 0.9)) == pytest.approx(0)
    assert d.expected_calibration_error(values, tensor(0.0, 0.0, 1.0, 1.0)) == pytest.approx(0.1)


def test_terminal_reach_and_share():
    assert d.terminal_reach(tensor(0.5, 0.5, 0.0), torch.tensor([3, 3, 1]), torch.tensor([0, 2, 0])).tolist() == [0.25, 1.0, 1.0]
    share = d.terminal_share(tensor(1.0, -1.0, 2.0, 3.0), torch.tensor([0, 0, 0, 1]), tensor(0.5, 0.9), 2)
    assert share.tolist() == pytest.approx([0.5 / 2.0, 1.0])


def test_lambda_sweep():
    """lambda 1 is the Monte-Carlo advantage itself; lambda 0 the one-step error."""
    rewards, values = tensor(0.0, 0.0, 1.0, 0.0, 0.0), tensor(0.2, 0.5, 0.6, 0.4, 0.1)
    table = d.lambda_sweep(rewards, values, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert table["1"] == {"correlation": pytest.approx(1), "sign_agreement": 1.0, "variance_ratio": pytest.approx(1)}
    assert table["0"]["variance_ratio"] < 1 and table["adaptive"] == table["0"]
    assert list(table) == ["0", "0.5", "0.9", "0.95", "0.99", "1", "adaptive"]


def test_token_weighting():
    table = d.token_weighting(tensor(1.0, 3.0), tensor(1.0, -1.0), torch.tensor([True, False]))
    assert table["effective_responses"] == pytest.approx(1.6) and table["length_sign_correlation"] == pytest.approx(-1)
    assert table["incorrect_token_share"] == 0.75 and table["incorrect_mass_share"] == 0.75


def test_lambda_audit():
    audit = d.lambda_audit(torch.tensor([10, 20, 40]), torch.tensor([True, True, False]), 0.05)
    assert audit["greatest"] == pytest.approx(0.5) and audit["least"] == 0 and audit["clamped_share"] == pytest.approx(2 / 3)
    assert audit["length_outcome_correlation"] < 0
