"""What every result promises: it is exported, prints well, and is plain data; what people look at is drawn."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import public_calls
import pytest
import torch
from public_calls import CALLS, Fresh
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm import identity, models, reconstruction
from onlynorm.display import Curve, Figure, Result, ShownResult, Table, View, write_page
from onlynorm.display.result import plain
from onlynorm.errors import MissingDataError
from onlynorm.solvers import spectrum

LIBRARY = [
    name for name in CALLS if name.partition(".")[0] not in ("evidence", "registry", "records", "page", "display")
]
SNAKE = re.compile(r"[a-z][a-z0-9_]*")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, shared: Path, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(public_calls, "FOLDER", shared)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


def results(value: Any) -> Iterator[Any]:
    """The objects of the library in what a call returned."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from results(item)
    elif type(value).__module__.startswith("onlynorm.") and not isinstance(value, nn.Module | Tensor):
        yield value


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LIBRARY)
def test_what_a_public_function_returns_is_exported_prints_well_and_is_plain_data(name: str) -> None:
    call = CALLS[name]
    arguments = {key: value.make() if isinstance(value, Fresh) else value for key, value in call.arguments.items()}
    try:
        returned = call.make()(**arguments)
    except MissingDataError as error:
        pytest.skip(str(error))
    for result in results(returned):
        kind = type(result)
        if kind.__name__ in name.split("."):
            continue  # made by the caller, not returned to him
        room = importlib.import_module(".".join(kind.__module__.split(".")[:2]))
        assert kind.__name__ in getattr(room, "__all__", [kind.__name__]), f"{room.__name__} does not export {kind}"
        assert " object at 0x" not in str(result)
        assert " object at 0x" not in repr(result)
        assert repr(result)
        assert not re.search(r"\b(tensor|array)\(", repr(result)), "entries of a tensor in a repr"
        data = result.as_dict()
        json.dumps(data, allow_nan=True)
        assert all(SNAKE.fullmatch(key) for key in data), list(data)


# ------------------------------------------------------------------------------- what people look at


def small() -> nn.Sequential:
    return models.mlp((4, 6, 3)).double().eval()


X, LABELS = normal(16, 4), torch.arange(16) % 3


def rebuilt() -> on.reconstruction.Reconstruction:
    return on.reconstruct(small(), X, on.Wide(features="id_cond"))


def trained() -> Any:
    model = models.mlp((4, 6, 3), norm="batch").double()
    return on.fit(model, (X, LABELS), schedule=on.Schedule(epochs=2, batch_size=8))


SHOWN: dict[str, Any] = {
    "Diagnosis": lambda: on.diagnose(small(), X, LABELS),
    "Repaired": lambda: on.repair(models.mlp((4, 6, 6, 3)).double(), X, LABELS, method="lsuv"),
    "Plan": lambda: on.plan(small(), inputs=X),
    "Reconstruction": rebuilt,
    "Verification": lambda: on.verify(small(), rebuilt().network, X),
    "Spectrum": lambda: spectrum.measure_spectrum(on.draw("he_normal", (6, 6))),
    "ExcessSweep": lambda: spectrum.sweep_excess("he_normal", (4, 4), excesses=(0.5, 2.0), seeds=(0,)),
    "Solution": lambda: on.solve(normal(4, 40), normal(40, 6, seed=1), normal(4, 6, seed=2), method="krylov"),
    "Factorization": lambda: on.factorize(normal(4, 4), 8),
    "OffSample": lambda: identity.measure_off_sample(on.memorize(X, LABELS), X, labels=LABELS),
    "ChainAverages": lambda: on.simulate(on.Chain(width=4, n_chains=3), 5),
    "Fit": trained,
    "Alignment": lambda: on.align(normal(4, 5), normal(4, 10, seed=1), normal(10, 5, seed=2)),
    "CertifiedPrice": lambda: reconstruction.certified_price(small(), X, box=on.Box(X.amin(0), X.amax(0))),
    "Descent": lambda: identity.Landscape(1.5 * torch.eye(2)).descend(0.1 * normal(3, 2, 2), n_steps=3),
}  # fmt: skip


def kinds(base: type) -> set[str]:
    """The names of the subclasses in the library; those of commands have tests of their own."""
    own = {one.__name__ for one in base.__subclasses__() if not one.__module__.startswith("onlynorm.cli")}
    return own.union(*(kinds(one) for one in base.__subclasses__()))


def test_every_result_that_shows_itself_is_tried() -> None:
    assert {name for name in kinds(ShownResult) if name[0] != "_"} == set(SHOWN)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SHOWN)
def test_a_result_is_drawn_and_written_as_a_page_that_loads_nothing(name: str, tmp_path: Path) -> None:
    result = SHOWN[name]()
    assert type(result).__name__ == name
    figure = result.plot()
    assert figure.curves
    assert {curve.panel for curve in figure.curves} <= {panel.name for panel in figure.panels}
    page = result.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in page
    assert "default-src 'none'" in page
    assert page.count("<svg") == (1 if len(figure.used_panels) == 1 else 2)
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', page) == []
    assert f"<h1>{result.view().title}</h1>".replace("'", "&#39;") in page
    assert repr(result) == str(result)
    assert "<svg" in result._repr_html_()
    assert "<html" not in result._repr_html_()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pages_escape_names_and_take_a_title(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("<img src=x>", nn.Linear(4, 3))
    found = on.diagnose(model.double(), X, LABELS)
    page = found.to_html(tmp_path / "page.html", title="<b>mine</b>").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "<img" not in found._repr_html_()
    assert "<h1>&lt;b&gt;mine&lt;/b&gt;</h1>" in page


def test_colours_of_curves_follow_the_page() -> None:
    svg = Figure([Curve("a", (1, 2), (1, 2)), Curve("b", (1, 2), (2, 1), style="law")]).inline_svg()
    assert "var(--curve-0, #0072b2)" in svg
    assert "currentColor" in svg
    css = (Path(on.__file__).parent / "display/page.css").read_text(encoding="utf-8")
    assert css.count("--curve-0:") == 2, "one for light pages, one for dark ones"


def test_panels_are_below_each_other_on_a_phone() -> None:
    panels = [Curve("a", (1, 2), (1, 2), panel=name) for name in ("left", "right")]
    wide, narrow = (f"<svg{part}" for part in Figure(panels).responsive_svg().split("<svg")[1:])
    assert 'class="wide"' in wide
    assert re.search(r'class="narrow" style="display: none;', narrow), "hidden where no style sheet shows it"
    sizes = [[float(x) for x in re.search(r'viewBox="0 0 (\S+) (\S+)"', one).groups()] for one in (wide, narrow)]
    assert sizes[0][0] > 2 * sizes[0][1] > sizes[1][0]
    assert sizes[1][1] > 1.5 * sizes[1][0]
    ids = [set(re.findall(r' id="([^"]+)"', one)) for one in (wide, narrow)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert Figure(panels[:1]).responsive_svg() == Figure(panels[:1]).inline_svg()


def test_an_iterative_solve_remembers_its_residuals_and_a_direct_one_has_none() -> None:
    left, right, target = normal(4, 40), normal(40, 6, seed=1), normal(4, 6, seed=2)
    found = on.solve(left, right, target, method="krylov")
    assert found.history[-1][0] == found.iterations
    assert found.history[-1][1] <= found.history[0][1]
    assert on.solve(left, right, target, method="cholesky").history == ()


def test_a_verification_knows_the_error_of_every_output_and_sample() -> None:
    target, network = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    network.load_state_dict(target.state_dict())
    with torch.no_grad():
        network.bias[1] += 0.5
    found = on.verify(target, network, X, batch_size=5)
    assert found.output_errors == pytest.approx((0.0, 0.5, 0.0))
    with torch.no_grad():
        sizes = target(X).norm(dim=1)
    assert found.sample_errors == pytest.approx((0.5 / sizes).tolist())
    assert "output_errors" not in found.as_dict()


def test_plain_data_of_what_has_no_json() -> None:
    class Toy(Result):
        __dataclass_fields__ = {"a": None, "b": None}  # noqa: RUF012
        a, b = torch.ones(2, 3), (1, {"x": Path("f")}, nn.ReLU(), torch.float32)

    assert Toy().as_dict() == {
        "a": {"shape": [2, 3], "dtype": "float32"}, "b": [1, {"x": "f"}, "ReLU", "float32"],
    }  # fmt: skip
    assert plain(None) is None


def test_a_view_without_anything_makes_a_page(tmp_path: Path) -> None:
    class _Bare(ShownResult):
        def plot(self) -> Figure:
            return Figure()

        def view(self) -> View:
            return View("Nothing", tables={"Rows": Table(("a",), [(1.5,)])})

        def __str__(self) -> str:
            return "bare"

    page = _Bare().to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<svg" not in page
    assert "1.5" in page


def test_control_characters_in_names_reach_neither_text_nor_page() -> None:
    model = nn.Sequential()
    model.add_module("a\x1b[2J\u202e", nn.Linear(4, 3))
    model = model.double().eval()
    plan, made, found = on.plan(model, X), on.reconstruct(model, X), on.diagnose(model, X)
    for result in (plan, made, found):
        for text in (str(result), repr(result), result._repr_html_()):
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert "\\x1b[2J\\u202e" in text


# ------------------------------------------------------------------------------------------------------- reprs


@dataclasses.dataclass(frozen=True)
class _Held(Result):
    weight: Tensor
    other: np.ndarray
    names: tuple[str, ...]
    numbers: list[int]
    inside: dict[str, Tensor]
    model: nn.Module
    hidden: Tensor = dataclasses.field(repr=False)


def test_a_repr_has_shapes_instead_of_entries_and_the_first_of_many_items() -> None:
    held = _Held(
        torch.ones(100, 3), np.ones(4), ("a",), list(range(50)), {"w": torch.tensor(1.0)}, nn.Linear(2, 2),
        torch.ones(9),
    )  # fmt: skip
    assert repr(held) == (
        "_Held(weight=Tensor(100, 3, float32), other=ndarray(4, float64), names=('a',), "
        "numbers=[0, 1, 2, 3, 4, 5, ... 50 in total], inside={'w': Tensor(float32)}, model=Linear(...))"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: on.Box(torch.zeros(300, 7), torch.ones(300, 7)), "Box of shape (300, 7) from 0 to 1"),
        (lambda: on.Chain(width=8), "chains of width 8"),
        (lambda: on.Schedule(epochs=3), "Schedule(epochs=3, "),
        (lambda: on.Ranges(box=on.Box(X, X + 1)), "Ranges(box=Box of shape (16, 4)"),
        (lambda: on.Adapters(trained_model()), "Adapters of Sequential: none"),
        (lambda: on.only_norms(trained_model()), "12 of 63 parameters are trained"),
        (lambda: on.draw("he_normal", (300, 40)), "he_normal features for a target of shape (300, 40)"),
        (lambda: on.frozen.converted(on.to_norm_only(small())), "2 norm-only layers"),
        (lambda: on.NormOnlyLinear(3, 2, bias=False), "in_features=3, out_features=2, bias=False"),
        (lambda: on.NormOnlyConv2d(3, 2, 3, stride=2, groups=1, padding=1),
         "3, 2, kernel_size=(3, 3), bias=True, stride=(2, 2), padding=(1, 1)"),
        (lambda: on.memorize(X, LABELS), "4 inputs, 3 classes, 16 memorized points"),
        (lambda: on.memorize_norms(X, LABELS), "he_normal, 20 features, seed=0, code='number', 16 memorized points"),
        (lambda: identity.Landscape(torch.eye(64)), "target=Tensor(64, 64, float64)"),
        (lambda: Figure([Curve("a", range(500), range(500))]), "Figure(1 curves in 1 panels)"),
        (lambda: Curve("a", range(500), range(500)), "line of 500 values"),
        (lambda: Table(("a", "b"), [(1, 2)] * 9), "Table(9 rows of a, b)"),
    ],
)  # fmt: skip
def test_reprs_say_what_the_object_is_in_a_few_lines(make: Callable[[], Any], words: str) -> None:
    text = repr(make())
    assert words in text
    assert len(text) < 1000


def trained_model() -> nn.Module:
    return models.mlp((4, 6, 3), norm="batch")


def test_a_handle_of_many_norms_has_a_short_repr_and_a_full_text() -> None:
    handle = on.only_norms(models.mlp((2, *[2] * 40, 2), norm="batch"))
    assert len(str(handle).splitlines()) > 80
    assert len(repr(handle).splitlines()) < 20
    assert "... 68 more" in repr(handle)


def test_a_page_needs_no_text(tmp_path: Path) -> None:
    page = write_page(tmp_path / "page.html", [public_calls._diagnosis()], title="Without text")
    assert "Without text" in page.read_text(encoding="utf-8")
