"""Random combinations of wrapper, optimizer, statistics and extra parameters: a loaded adapter gives equal outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(8),
    "batch without affine": lambda: nn.BatchNorm1d(8, affine=False),
    "layer": lambda: nn.LayerNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
}


class Net(nn.Module):
    """Three layers and norms; two of them are tied on request."""

    def __init__(self, norm: str, *, is_tied: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.head = (nn.Linear(n, m) for n, m in ((6, 8), (8, 8), (8, 8), (8, 3)))
        self.norm, self.second_norm = NORMS[norm](), nn.BatchNorm1d(8)
        self.third_norm = self.second_norm if is_tied else nn.BatchNorm1d(8, affine=False)
        if is_tied:
            self.last.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = torch.relu(self.second_norm(self.middle(hidden)))
        made: Tensor = self.head(torch.relu(self.third_norm(self.last(hidden))))
        return made


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda model: model, compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(model))
)  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(30))
def test_an_adapter_of_any_combination_gives_equal_outputs(seed: int, tmp_path: Path) -> None:
    pick = random.Random(seed)
    norm, is_tied, add_affine = pick.choice(list(NORMS)), pick.random() < 0.5, pick.random() < 0.3
    wrap, wrap_fresh = pick.choice(WRAPPERS), pick.choice(WRAPPERS)
    statistics = pick.choice(("freeze", "track", "recalibrate"))
    also = pick.choice(((), ("head",), ("head", "middle"), ("*.bias",), ("last.weight",)))
    kind = pick.choice((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS))
    torch.manual_seed(seed)
    x, y = torch.randn(48, 6), torch.arange(48) % 3
    base, fresh = Net(norm, is_tied=is_tied), Net(norm, is_tied=is_tied)
    fresh.load_state_dict(base.state_dict())
    model = wrap(base)
    handle = on.only_norms(model, statistics=statistics, also=also, add_affine=add_affine)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    before = model(x).detach()
    for inputs, targets in zip(x.split(16), y.split(16), strict=True):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
    if statistics == "recalibrate":
        handle.recalibrate(x.split(24))
    on.save_adapter(model, tmp_path / "adapter.safetensors")
    on.load_adapter(wrap_fresh(fresh), tmp_path / "adapter.safetensors")
    outputs = model.eval()(x)
    assert not torch.equal(outputs, before)
    assert torch.equal(fresh.eval()(x), outputs)
    trained, loaded = base.state_dict(), fresh.state_dict()
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in trained.items())
