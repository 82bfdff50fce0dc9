"""Inputs whose dtype does not fit the model: the error names the dtype that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import OnlynormError

LABELS = torch.arange(12) % 3
CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "reconstruct": lambda model, x: on.reconstruct(model.eval(), x),
    "plan": lambda model, x: on.plan(model, x),
    "verify": lambda model, x: on.verify(model.eval(), model.eval(), x),
    "diagnose": lambda model, x: on.diagnose(model, x, LABELS),
    "repair": lambda model, x: on.repair(model, x, LABELS, force=True),
    "fit": lambda model, x: on.fit(model, (x, LABELS), schedule=on.Schedule(epochs=1, batch_size=6)),
    "recalibrate": lambda model, x: on.only_norms(model).recalibrate([x]),
}
CASTS = ("reconstruct", "plan", "verify")
"""Calls that cast floating-point inputs to the precision of the model."""

GIVEN = (torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
CASES = [
    (name, dtype, given)
    for name in CALLS
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for given in GIVEN
    if given != dtype and (name, dtype) != ("reconstruct", torch.bfloat16)  # which needs another model
]


def network(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "dtype", "given"), CASES, ids=str)
def test_the_cure_names_the_dtype_of_the_model(name: str, dtype: torch.dtype, given: torch.dtype) -> None:
    x = torch.rand(12, 4).mul(9).to(given) if given != torch.bool else torch.rand(12, 4) > 0.5
    if name in CASTS and given.is_floating_point:
        CALLS[name](network(dtype), x)
        return
    with pytest.raises(OnlynormError, match=r"[Pp]ass inputs of the dtype of the model, with inputs.to\(torch") as info:
        CALLS[name](network(dtype), x)
    wanted = torch.float64 if name == "reconstruct" else torch.float32 if name == "plan" else dtype
    assert f"inputs.to({wanted})" in str(info.value)
    if name not in ("reconstruct", "plan"):
        CALLS[name](network(dtype), x.to(wanted))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("given", [torch.float32, torch.uint8])
def test_tokens_need_to_be_indices(name: str, given: torch.dtype) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    tokens = torch.arange(36).reshape(12, 3) % 9
    with pytest.raises(OnlynormError, match=r"indices of an embedding as int64, with inputs.long\(\)"):
        CALLS[name](make(), tokens.to(given))
    CALLS[name](make(), tokens)
