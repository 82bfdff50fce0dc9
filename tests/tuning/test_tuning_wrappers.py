"""Models inside wrappers and with quantized weights are tuned, saved and loaded like the models themselves."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from onlynorm.errors import ConversionError
from onlynorm.modules import find_norms, fold, unfold
from onlynorm.tuning import (
    Adapters,
    Schedule,
    accuracy,
    apply_adapter,
    fit,
    load_adapter,
    only_norms,
    save_adapter,
    take_adapter,
)
from onlynorm.tuning.fingerprint import fingerprint


def make() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, generator=generator), torch.arange(24) % 3


def train(model: nn.Module) -> None:
    inputs, labels = data()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()


def same(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process, by gloo."""
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}
pytestmark = pytest.mark.usefixtures("process_group", "unchecked")


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_a_wrapped_model_is_saved_with_its_head_and_loads_anywhere(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model = make()
    only_norms(model, also="3")
    wrapped = WRAPPERS[name](model)
    train(wrapped)
    adapter = save_adapter(wrapped, path)
    assert set(adapter.heads) == {"3.weight", "3.bias"}
    assert adapter.tensors.keys() == take_adapter(model).tensors.keys()
    fresh = make()
    load_adapter(fresh, path)
    assert same(fresh, model)
    other = make()
    load_adapter(WRAPPERS[name](other), path)
    assert same(other, model)


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_wrappers_are_looked_through_everywhere(name: str) -> None:
    model = make()
    wrapped = WRAPPERS[name](model)
    assert find_norms(wrapped) == find_norms(model)
    base = copy.deepcopy(model.state_dict())
    adapters = Adapters(wrapped)
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    adapters.capture("a")
    adapters.disable()
    assert all(torch.equal(value, base[key]) for key, value in model.state_dict().items())
    model.eval()
    folded = fold(wrapped)
    assert folded.folded == (("0", "1"),)
    assert same(unfold(folded), model)
    assert accuracy(wrapped, data()) == accuracy(model, data())


@pytest.mark.parametrize("name", ["data parallel", "compiled"])
def test_norms_are_chosen_in_a_wrapped_model(name: str) -> None:
    model = make()
    handle = only_norms(WRAPPERS[name](model), also="3", statistics="freeze")
    assert [n for n, _ in handle.named_parameters()] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    with pytest.raises(ConversionError, match="already prepared"):
        only_norms(model)


def test_gradients_that_a_wrapper_waits_for_are_not_taken_away() -> None:
    model = make()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ConversionError, match=r"only_norms needs .*before DistributedDataParallel"):
        only_norms(wrapped)
    assert all(p.requires_grad for p in model.parameters())
    train(wrapped)
    patient = DistributedDataParallel(make(), find_unused_parameters=True)
    only_norms(patient)
    train(patient)


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_a_wrapped_model_is_fitted_like_the_model_itself(name: str, tmp_path: Path) -> None:
    schedule = Schedule(epochs=2, batch_size=8, lr=0.1)
    plain, model = make(), make()
    for one in (plain, model):
        only_norms(one, also="3")
    fit(plain, data(), schedule=schedule)
    wrapped = WRAPPERS[name](model)
    fit(wrapped, data(), schedule=schedule, checkpoint=tmp_path / "run.safetensors")
    # Compiled code may round in another order; 6 steps, with room for a hundred roundings.
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-5)
    again = make()
    only_norms(again, also="3")
    fit(again, data(), schedule=schedule, checkpoint=tmp_path / "run.safetensors")
    assert same(again, model)


def test_a_compiled_part_of_a_model_does_not_change_the_names(tmp_path: Path) -> None:
    def nested(*, is_compiled: bool) -> nn.Module:
        inner = make()
        return nn.ModuleDict({"body": torch.compile(inner, backend="eager") if is_compiled else inner})

    model = nested(is_compiled=True)
    handle = only_norms(model, also="body.3")
    assert [norm.name for norm in handle.norms] == ["body.1"]
    with torch.no_grad():
        for p in handle.parameters():
            p += 0.5
    save_adapter(model, tmp_path / "a.safetensors")
    for is_compiled in (False, True):
        fresh = nested(is_compiled=is_compiled)
        load_adapter(fresh, tmp_path / "a.safetensors")
        pairs = zip(fresh.state_dict().values(), model.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------------- quantized and wrapped tensors


def quantized(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.LSTM(5, 4), nn.Linear(4, 3))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM})


@pytest.mark.filterwarnings("ignore")
def test_a_dynamically_quantized_base_is_told_from_another(tmp_path: Path) -> None:
    model = quantized()
    handle = only_norms(model)
    with torch.no_grad():
        for p in handle.parameters():
            p += 0.25
    save_adapter(model, tmp_path / "a.safetensors")
    fresh = quantized()
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert torch.equal(fresh[1].weight, model[1].weight)
    with pytest.raises(ConversionError, match=r"needs the base model it was trained on; got \d+ tensors"):
        load_adapter(quantized(seed=1), tmp_path / "a.safetensors")
    adapters = Adapters(fresh)
    adapters.capture("a")
    adapters.disable()


class Halved(Tensor):
    """A tensor subclass as torchao writes them: values and scale in two other tensors, and operations of its own."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Halved:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Halved:
        return cls(parts["values_"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].values_.clone(), args[0].scale.clone())
        plain = [a.values_.float() * a.scale if isinstance(a, cls) else a for a in args]
        return function(*plain, **(kwargs or {}))


class Opaque(Halved):
    """One that does not say what it is made of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise NotImplementedError("opaque")


def subclassed(kind: type[Halved] = Halved, *, value: int = 3) -> nn.Module:
    model = make()
    parts = torch.full((5, 6), value, dtype=torch.int8), torch.tensor(0.5)
    model[0].weight = nn.Parameter(kind(*parts), requires_grad=False)
    return model


def test_a_base_of_tensor_subclasses_is_told_from_another(tmp_path: Path) -> None:
    model = subclassed()
    only_norms(model, also="3")
    train(model)
    save_adapter(model, tmp_path / "a.safetensors")
    fresh = subclassed().eval()
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert torch.equal(fresh(data()[0]), model(data()[0]))
    with pytest.raises(ConversionError, match=r"1 with other values \(0\.weight\)"):
        load_adapter(subclassed(value=2), tmp_path / "a.safetensors")
    with pytest.raises(ConversionError, match=r"'0\.weight' \(Opaque\) cannot be read: opaque"):
        save_adapter(subclassed(Opaque), tmp_path / "b.safetensors")


class Extra(nn.LayerNorm):
    """A norm with a state of its own beside its tensors."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_other_entries_of_a_state_dict_are_compared_too() -> None:
    def extra(value: Any) -> nn.Module:
        model = nn.Sequential(Extra(3))
        model[0].extra = value
        return model

    values = [None, 1, 2.5, "a", b"a", io.BytesIO(b"a"), {"a": torch.ones(2)}, [torch.zeros(2)], torch.ones(2).numpy()]
    marks = [fingerprint(extra(value), ()) for value in values]
    assert len(set(marks)) == len(values)
    assert marks == [fingerprint(extra(value), ()) for value in values]
    adapter = take_adapter(extra({"a": 1}))
    apply_adapter(extra({"a": 1}), adapter)
    with pytest.raises(ConversionError, match=r"another name, shape or dtype \(0\._extra_state\)"):
        apply_adapter(extra({"a": 2}), adapter)
    with pytest.raises(ConversionError, match=r"_extra_state' \(object\)"):
        take_adapter(extra(object()))


ODD: dict[str, Callable[[float], Tensor]] = {
    "sparse": lambda x: x * torch.eye(3).to_sparse(),
    "sparse rows": lambda x: x * torch.eye(3).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x * torch.eye(3), 0.1, 0, torch.qint8),
    "quantized by channel": lambda x: torch.quantize_per_channel(
        x * torch.eye(3), torch.ones(3), torch.zeros(3), 0, torch.qint8
    ),
    "conjugate": lambda x: x * torch.eye(3, dtype=torch.complex64).conj(),
    "scalar": lambda x: torch.tensor(x),
    "empty": lambda x: torch.empty(0, 2),
}


@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_all_layouts_are_hashed(name: str) -> None:
    def odd(factor: float) -> nn.Module:
        model = nn.Sequential(nn.LayerNorm(3))
        model.register_buffer("odd", ODD[name](factor))
        return model

    adapter = take_adapter(odd(1.0))
    apply_adapter(odd(1.0), adapter)
    if name != "empty":
        with pytest.raises(ConversionError, match=r"\(odd\)"):
            apply_adapter(odd(2.0), adapter)


class Own(nn.Module):
    """A wrapper that onlynorm does not know."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_an_adapter_of_an_own_wrapper_around_a_prepared_model_is_refused(tmp_path: Path) -> None:
    model = make()
    only_norms(model, also=("3",))
    wrapped = Own(nn.DataParallel(model))
    train(wrapped)
    with pytest.raises(ConversionError, match=r"get_submodule\('inner.module'\)"):
        save_adapter(wrapped, tmp_path / "a.safetensors")
    save_adapter(wrapped.get_submodule("inner.module"), tmp_path / "a.safetensors")
    fresh = make()
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert same(fresh, model)


def test_an_own_wrapper_that_was_prepared_itself_is_saved(tmp_path: Path) -> None:
    wrapped = Own(make())
    only_norms(wrapped, also=("inner.3",))
    train(wrapped)
    save_adapter(wrapped, tmp_path / "a.safetensors")
    fresh = Own(make())
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert same(fresh, wrapped)
