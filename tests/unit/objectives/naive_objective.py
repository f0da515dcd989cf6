"""The specification of the objectives once more, as loops over lists: slow, one token at a time, the oracle of a random comparison."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch


def clamp(x, low, high):
    return torch.clamp(x, low, high) if isinstance(x, torch.Tensor) else min(max(x, low), high)


def flatten(groups):
    return list(itertools.chain.from_iterable(groups))


def kl_value(x, estimator: str):
    x = clamp(x, -20, 20)
    exp = torch.exp if isinstance(x, torch.Tensor) else math.exp
    return {"k1": lambda: x, "k2": lambda: x * x / 2, "k3": lambda: clamp(exp(-x) - 1 + x, -math.inf, 10.0)}[estimator]()


class Response:
    def __init__(self, given: dict[str, Any], group: int):
        self.group, self.given = group, given
        self.tokens = len(given["logp"])
        self.mask = [bool(m) for m in given.get("mask", [1] * self.tokens)]
        self.trained = [t for t in range(self.tokens) if self.mask[t]]
        self.length = len(self.trained)
        self.correct, self.truncated = given.get("correct", given["reward"] > 0), given.get("truncated", False)
        self.logp = torch.tensor(given["logp"], dtype=torch.float64, requires_grad=True)
        self.values = torch.tensor(given.get("values", given["logp"]), dtype=torch.float64, requires_grad=True)
        self.old = given.get("old_logp", given["logp"])
        self.rollout = given.get("rollout_logp", self.old)
        self.old_values = given.get("old_values", given.get("values"))
        self.dropped, self.reward = False, given["reward"]
        self.advantage = [0.0] * self.tokens


def mean(numbers):
    return sum(numbers) / len(numbers)


def std(numbers, kind):
    m = mean(numbers)
    return math.sqrt(sum((x - m) ** 2 for x in numbers) / (len(numbers) - (kind == "unbiased")))


def naive(p: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """`p`: every parameter resolved, with `name`. Returns advantages, loss and gradients nested by group and response."""
    everyone = [[Response(r, g) for r in group["responses"]] for g, group in enumerate(groups)]
    name, by_token = p["name"], p["name"] in ("ppo", "vapo", "reinforce_pp")
    kl = p["kl"]
    for response in flatten(everyone):
        shape_reward(response, p, kl, by_token)
    batch = everyone
    if p["drop_degenerate_groups"]:
        batch = [group for group in everyone if len({r.correct for r in group}) > 1]
    flat = flatten(batch)
    set_advantages(name, p, batch, kl)
    for r in flat:
        selected = {
            "raft": r.correct,
            "raft_pp": r.correct,
            "psr": r.correct,
            "nsr": not r.correct,
            "wapo": getattr(r, "winner", True),
        }.get(name, True)
        r.dropped = (p["overlong"] == "mask" and r.truncated) or not selected
    left = [(r, t) for r in flat if not r.dropped for t in r.trained]
    chosen = left
    if p["top_entropy_fraction"] is not None and left:
        count = max(1, math.ceil(p["top_entropy_fraction"] * len(left) - 1e-9))
        order = sorted(range(len(left)), key=lambda i: -left[i][0].given["entropy"][left[i][1]])
        chosen = [left[i] for i in sorted(order[:count])]
    weights = correction_weights(p["correction"], flat, left)
    if name in ("lpo", "tpo"):
        loss = listwise(name, p, batch)
    elif name == "wapo":
        loss = winners_loss(p, batch, chosen)
    else:
        loss = aggregate([(r, weights[r][t] * token_loss(name, p, r, t)) for r, t in chosen], p)
    if kl and kl["where"] == "loss":
        terms = [(r, kl["coef"] * kl_value(r.logp[t] - r.given["ref_logp"][t], kl["estimator"])) for r, t in left]
        loss = loss + aggregate(terms, p)
    if name == "vapo":
        positive = [r.logp[t] for r, t in left if r.correct]
        loss = loss - p["nll_coef"] * (sum(positive) / len(positive) if positive else 0.0)
    return collect(name, p, everyone, chosen, left, loss)


def shape_reward(r: Response, p, kl, by_token) -> None:
    penalty = p["overlong"]
    if isinstance(penalty, dict):
        free = penalty["max_length"] - penalty["cache"]
        if r.tokens > penalty["max_length"]:
            r.reward -= penalty["factor"]
        elif r.tokens > free:
            r.reward -= penalty["factor"] * (r.tokens - free) / penalty["cache"]
    r.kl = [0.0] * r.tokens
    if kl and kl["where"] == "reward":
        r.kl = [kl["coef"] * kl_value(r.old[t] - r.given["ref_logp"][t], kl["estimator"]) if r.mask[t] else 0.0 for t in range(r.tokens)]
        if not by_token:
            r.reward -= sum(r.kl)


def set_advantages(name, p, batch, kl) -> None:
    flat = flatten(batch)
    for group in batch:
        rewards = [r.reward for r in group]
        equal = len(group) == 1 or max(rewards) - min(rewards) < p["equal_tol"]
        m = mean(rewards)
        for r in group:
            r.equal, r.mean, r.size = equal, m, len(group)
            r.centred = 0.0 if equal else r.reward - m
            r.std = std(rewards, p["std"]) if not equal and p["std"] != "none" else None
    if name in ("ppo", "vapo", "reinforce_pp"):
        return value_advantages(name, p, flat)
    numbers = [r.centred for r in flat]
    batch_std = 0.0
    if numbers and max(numbers) - min(numbers) >= p["equal_tol"]:
        batch_std = std(numbers, p["std"]) if p["std"] != "none" else std(numbers, "population")
    for r in flat:
        match name:
            case "reinforce_pp_baseline":
                value = r.centred if p["std"] == "none" else (r.centred / (batch_std + p["std_eps"]) if batch_std else 0.0)
            case "maxrl":
                value = r.centred / r.mean if r.mean > p["equal_tol"] else 0.0
            case "raft" | "raft_pp" | "psr":
                value = 1.0
            case "nsr":
                value = -1.0
            case "w_reinforce":
                value = p["positive_weight"] if r.correct else -1.0
            case "reinforce_rej":
                value = r.reward
            case _:
                value = r.centred * (r.size / max(r.size - 1, 1) if name == "rloo" else 1.0)
                value = value / (r.std + p["std_eps"]) if r.std is not None else value
        if name == "wapo":
            r.winner = r.centred > p["equal_tol"]
        r.advantage = [value] * r.tokens
        r.batch_std = batch_std


def value_advantages(name, p, flat) -> None:
    for r in flat:
        rewards = {t: -r.kl[t] for t in r.trained}
        if r.trained:
            rewards[r.trained[-1]] += r.reward

        def gae(lam, r=r, rewards=rewards):
            result, following = {}, 0.0
            value_next = r.given["bootstrap_value"] if p.get("bootstrap_truncated") and r.truncated else 0.0
            for t in reversed(r.trained):
                value = 0.0 if name == "reinforce_pp" else r.old_values[t]
                following = rewards[t] + p["gamma"] * (0.0 if name == "reinforce_pp" else value_next) - value + p["gamma"] * lam * following
                result[t], value_next = following, value
            return result

        if name == "reinforce_pp":
            policy = gae(1.0)
        else:
            lam = p["lambda"]
            if p.get("alpha") is not None:
                lam = min(max(1 - 1 / (p["alpha"] * max(r.length, 1)), 0.0), 1.0)
            policy, critic = gae(lam), gae(lam if p["lambda_critic"] is None else p["lambda_critic"])
            r.targets = {t: critic[t] + r.old_values[t] for t in r.trained}
        r.advantage = [policy.get(t, 0.0) for t in range(r.tokens)]
    if name == "reinforce_pp" or p["whiten"]:
        numbers = [r.advantage[t] for r in flat for t in r.trained]
        if numbers:
            m, flatness = mean(numbers), max(numbers) - min(numbers) < p["equal_tol"]
            scale = math.sqrt(mean([(x - m) ** 2 for x in numbers]) + 1e-8)
            for r in flat:
                for t in r.trained:
                    r.advantage[t] = 0.0 if flatness else (r.advantage[t] - m) / scale


def correction_weights(c, flat, left) -> dict[Response, list[float]]:
    result = {}
    for r in flat:
        logs = [a - b for a, b in zip(r.old, r.rollout, strict=True)]
        total = sum(logs[t] for t in r.trained)
        result[r] = [1.0] * r.tokens
        if c is None:
            continue
        low, high = (0.0 if c["low"] is None else c["low"]), (math.inf if c["high"] is None else c["high"])
        for t in range(r.tokens):
            log = logs[t] if c["kind"] in ("token_tis", "token_mis", "icepop") else total
            log = total / max(r.length, 1) if c["kind"] == "geometric" else log
            rho = math.exp(clamp(log, -20, 20))
            inside = low <= rho <= high
            truncated = c["kind"] in ("token_tis", "sequence_tis")
            result[r][t] = clamp(rho, low, high) if truncated else float(inside) if c["kind"] == "geometric" else rho if inside else 0.0
    if c is not None and c["normalize"] and left:
        m = mean([result[r][t] for r, t in left])
        if m > 0:
            result = {r: [w / m for w in weights] for r, weights in result.items()}
    return result


def token_loss(name, p, r: Response, t: int):
    advantage, logp = r.advantage[t], r.logp[t]
    if p["ratio"] == "none":
        return -advantage * logp
    if p["ratio"] == "token":
        ratio = torch.exp(clamp(logp - r.old[t], -20, 20))
    else:
        m = sum(float(r.logp[u].detach()) - r.old[u] for u in r.trained) / r.length
        ratio = torch.exp(clamp(torch.tensor(m, dtype=torch.float64) + logp - logp.detach(), -20, 10))
    low = -math.inf if p["clip_low"] is None else 1 - p["clip_low"]
    high = math.inf if p["clip_high"] is None else 1 + p["clip_high"]
    if name == "cispo":
        return -clamp(ratio, low, high).detach() * advantage * logp
    loss = torch.maximum(-ratio * advantage, -clamp(ratio, low, high) * advantage)
    if p["dual_clip"] is not None and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-p["dual_clip"] * advantage, dtype=torch.float64))
    return loss


def aggregate(terms, p):
    if not terms:
        return torch.zeros((), dtype=torch.float64)
    if p["aggregation"] == "token_mean":
        return sum(x for _, x in terms) / len(terms)
    by_response: dict[Response, list] = {}
    for r, x in terms:
        by_response.setdefault(r, []).append(x)
    total = sum(sum(xs) / (len(xs) if p["aggregation"] == "seq_mean_token_mean" else 1) for xs in by_response.values()) / len(by_response)
    return total / p["norm_length"] if p["aggregation"] == "seq_mean_token_sum_norm" else total


def winners_loss(p, batch, chosen):
    total = torch.zeros((), dtype=torch.float64)
    for r, t in chosen:
        loss = -r.advantage[t] * r.logp[t]
        if p["ratio"] == "token":
            cap = math.inf if p["clip_high"] is None else 1 + p["clip_high"]
            loss = -clamp(torch.exp(clamp(r.logp[t] - r.rollout[t], -20, 20)), -math.inf, cap) * r.advantage[t]
        total = total + (loss / len(chosen) if p["normalize"] == "kept_tokens" else loss / (r.size * p["norm_length"]))
    winning = sum(any(r.winner for r in group) for group in batch)
    return total if p["normalize"] == "kept_tokens" else total / max(1, winning)


def listwise(name, p, batch):
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        total = total + (lpo_group if name == "lpo" else tpo_group)(p, group) / len(batch)
    return total


def tpo_group(p, group):
    sums = torch.stack(
        [sum([r.logp[t] if not r.dropped else r.logp[t].detach() for t in r.trained], torch.zeros((), dtype=torch.float64)) for r in group]
    )
    old = torch.tensor([sum(r.old[t] for t in r.trained) for r in group], dtype=torch.float64)
    spread = std([r.reward for r in group], "population")
    u = torch.tensor([0.0 if r.equal or spread < 1e-6 else r.centred / spread for r in group], dtype=torch.float64)
    q = (old.log_softmax(0) + u / p["eta"]).softmax(0)
    for r, c in zip(group, (sums.softmax(0) - q).tolist(), strict=True):
        r.advantage = [-c] * r.tokens
    return -(q * sums.log_softmax(0)).sum()


def lpo_group(p, group):
    def scores(logps):
        return torch.tensor([sum(x[t] - r.rollout[t] for t in r.trained) / max(r.length, 1) for r, x in zip(group, logps, strict=True)],
                            dtype=torch.float64)  # fmt: skip

    size, rewards = len(group), [r.reward for r in group]
    tau = {"group_std": std(rewards, "population"), "one": 1.0, "group_mean": group[0].mean, "rloo": (size - 1) / size,
           "batch_std": group[0].batch_std}.get(p["tau"], p["tau"])  # fmt: skip
    c = torch.zeros(size, dtype=torch.float64)
    if not group[0].equal and not (p["tau"] == "group_mean" and tau <= p["equal_tol"]):
        policy = scores([r.logp.tolist() for r in group]).log_softmax(0)
        target = (torch.tensor(rewards, dtype=torch.float64) / tau + scores([r.old for r in group])).log_softmax(0)
        big, w = policy.exp(), target.exp()
        ratio = (target - policy).clamp(-20, 20).exp()
        a = p["alpha"]
        h = {
            "reverse_kl": policy - target,
            "js": -0.5 * ((1 + ratio) / 2).log(),
            "hellinger": 0.5 * (1 - ratio**0.5),
            "alpha": -(ratio**a) / a,
            "tv": 0.5 * torch.sign(big - w),
            "chi2_reverse": 2 * (1 / ratio - 1),
            "chi2_forward": 1 - ratio**2,
        }.get(p["divergence"])
        c = big - w if h is None else big * (h - (big * h).sum())
        c = -w if p["pointwise"] else c
    low = -math.inf if p["clip_low"] is None else math.log(1 - p["clip_low"])
    high = math.inf if p["clip_high"] is None else math.log(1 + p["clip_high"])
    total = torch.zeros((), dtype=torch.float64)
    for r, coefficient in zip(group, c.tolist(), strict=True):
        r.advantage = [-coefficient] * r.tokens
        for t in [] if r.dropped else r.trained:
            plain = coefficient * (r.logp[t] - r.rollout[t])
            bound = coefficient * clamp(r.logp[t] - r.rollout[t], low, high)
            total = total + {"none": plain, "hard": bound, "pessimistic": torch.maximum(plain, bound)}[p["clip_mode"]] / r.length
    return total


def collect(name, p, everyone, chosen, left, loss) -> dict[str, Any]:
    if loss.requires_grad:
        loss.backward()
    reached = {(id(r), t) for r, t in (left if name in ("lpo", "tpo") else chosen)}
    flat = flatten(everyone)

    def nest(per_response):
        return [x for r in flat for x in per_response(r)]

    result = {
        "advantages": nest(lambda r: [r.advantage[t] if (id(r), t) in reached else 0.0 for t in range(r.tokens)]),
        "loss": float(loss.detach()),
        "grad_logp": nest(lambda r: [0.0] * r.tokens if r.logp.grad is None else r.logp.grad.tolist()),
    }
    if name in ("ppo", "vapo"):
        total = torch.zeros((), dtype=torch.float64)
        for r, t in left:
            target, old, value, c = r.targets[t], r.old_values[t], r.values[t], p["value_clip"]
            error = (value - target) ** 2
            error = error if c is None else torch.maximum(error, (clamp(value, old - c, old + c) - target) ** 2)
            total = total + error / 2 / len(left)
        if total.requires_grad:
            total.backward()
        result |= {
            "value_loss": float(total.detach()),
            "grad_values": nest(lambda r: [0.0] * r.tokens if r.values.grad is None else r.values.grad.tolist()),
        }
    return result
