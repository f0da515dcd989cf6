"""AdamW for Megatron's optimizers on a CPU.

Megatron's checkpoints of the distributed optimizer expect the layout of the fused Adam of Apex and Transformer Engine: `step` is kept in
the parameter group, and a parameter's state holds `exp_avg` and `exp_avg_sq` only. torch's own AdamW keeps `step` per parameter, and what
it saves does not load again. So this class keeps the fused layout and calls torch's arithmetic.
"""

from __future__ import annotations

import importlib

import torch

_adamw = importlib.import_module("torch.optim.adamw").adamw
_adam = importlib.import_module("torch.optim.adam").adam


class FusedLayoutAdam(torch.optim.Optimizer):
    """Adam, with decoupled weight decay if `adam_w_mode`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **_fused_options):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = []
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                states.append(state)
            update = _adamw if self.adam_w_mode else _adam
            update(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],  # torch counts up before it uses the number
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                foreach=True,
            )


def install() -> None:
    """Give Megatron this Adam in the place of Apex's or Transformer Engine's."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedLayoutAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
