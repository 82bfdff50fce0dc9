"""Files of factors: the same factors again, and files that are damaged or do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from square_matrices import positive, symmetric

import onlynorm as on
from onlynorm.errors import FormatError
from onlynorm.identity import factorize
from onlynorm.storage import read_tensors, write_tensors


def test_factors_come_back_from_a_file_the_same(tmp_path: Path) -> None:
    path = tmp_path / "factors.safetensors"
    for method in ("spiral", "svd"):
        matrix = positive(4)
        matrix[0] = -matrix[0]
        found = factorize(matrix, 20, method=method)
        on.save(found, path)
        back = on.load(path)
        assert torch.equal(back.factors(), found.factors())
        assert back.as_dict() == found.as_dict()
        assert str(back) == str(found)
    assert path.stat().st_size < 20 * 25 * 8 * 2


@pytest.mark.parametrize(
    ("has_core", "change"),
    [
        (False, {}),
        (True, {"runs": [0]}),
        (True, {"dim": 7}),
        (True, {"options": [{"max_norm": 1.0}]}),
        (True, {"runs": [2.0**70]}),
        (True, {"runs": []}),
        (True, {"runs": ["5"]}),
        (True, {"n_extra": -1}),
        (True, {"max_norm": 1e-9}),
        (True, {"max_norm": "0.1"}),
        (True, {"depth": 7}),
        (True, {"seconds": 10**400}),
        (True, {"reason": 3}),
        (True, {"more": 1}),
    ],
    ids=[
        "no core",
        "no layers",
        "another size",
        "an option without a name",
        "a fraction of layers",
        "no runs",
        "a word",
        "fewer dimensions",
        "another norm",
        "a norm in words",
        "another depth",
        "a number beyond float64",
        "a reason without words",
        "a field too many",
    ],
)
def test_a_sealed_file_that_does_not_fit_together_is_refused(
    tmp_path: Path, has_core: bool, change: dict[str, object]
) -> None:
    path = tmp_path / "factors.safetensors"
    found = factorize(symmetric(3), 5, method="root")
    kept = {"core.0": found.runs[0].core.contiguous()} if has_core else {"other": torch.ones(1)}
    write_tensors(path, kept, kind="factorization", format=1, document={"factorization": found.as_dict() | change})
    with pytest.raises(FormatError, match=r"needs matching tensors and metadata; factors\.safetensors"):
        on.load(path)


@pytest.mark.parametrize("name", ["core.0", "basis.0", "angles.0"])
@pytest.mark.parametrize("change", ["nan", "float32", "shape", "scaled"])
def test_forged_tensors_are_refused(tmp_path: Path, name: str, change: str) -> None:
    matrix = positive(4)
    matrix[0] = -matrix[0]
    found = factorize(matrix, 20, method="spiral")
    path = tmp_path / "factors.safetensors"
    on.save(found, path)
    document, tensors = read_tensors(path, kind="factorization", format=1, cure="")
    assert name in tensors
    value = tensors[name]
    changes = {"nan": value * torch.nan, "float32": value.float(), "shape": value[:-1], "scaled": 2 * value}
    if (name, change) == ("angles.0", "scaled") or (name, change) == ("angles.0", "shape"):
        return  # other angles are other factors, and nothing in the file says which were meant
    facts = {"factorization": document["factorization"]}
    write_tensors(path, {**tensors, name: changes[change]}, kind="factorization", format=1, document=facts)
    with pytest.raises(FormatError, match=r"needs matching tensors and metadata"):
        on.load(path)
