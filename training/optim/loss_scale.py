"""Dynamic loss scale of FP16 runs, with the rule of torch.amp.GradScaler.

FP16 rounds values below 3e-8 to zero, and many gradients are smaller. The loss is therefore multiplied by a
scale before backward, and gradients are divided by it in the optimizer. If a gradient overflows, the step is
skipped and the scale halved.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # applied steps before the scale is doubled
MINIMUM_SCALE = 1.0  # gradients that overflow at this scale are an error of the run


class LossScale:
    """The scale and its history, on the device: the host does not wait for them."""

    def __init__(self, device: torch.device):
        self.value = torch.full((), INITIAL_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)  # applied since the scale last changed

    def update(self, *, applied: Tensor, overflow: Tensor) -> None:
        """Double the scale after GROWTH_INTERVAL applied steps, halve it after an overflow (bool scalars).

        `value` becomes another tensor, so that a step's result can keep the scale that it used.
        """
        steps = self.good_steps + applied.float()
        grows = steps >= GROWTH_INTERVAL
        grown = torch.where(grows, 2 * self.value, self.value)
        self.value = torch.where(overflow, (self.value / 2).clamp(min=MINIMUM_SCALE), grown)
        self.good_steps = torch.where(overflow | grows, 0.0, steps)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint. Waits for the device."""
        return {"scale": self.value.item(), "good_steps": self.good_steps.item()}

    def load(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.value.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])
