"""Names, transposed experts and the coverage proof, on plain modules; tests/test_engine.py has the real ones."""

import pytest
import torch

from parallel.layout import Piece
from rollout.vllm_params import (
    check,
    clear_padding,
    experts_transposed,
    require_stable,
    restore_transposed_experts,
    stores,
)

W = "model.layers.{layer}.w"


def piece(rows=(0, 4), cols=(0, 3), store=W, offset=0, layers=(0, 2), strides=(12, 3, 1)):
    return Piece("w", (layers, (0, 1), rows, cols), store, 0, offset, strides)


def tensors(rows=4, cols=3, dtype=torch.float32):
    return {f"model.layers.{layer}.w": torch.ones(rows, cols, dtype=dtype) for layer in range(2)}


def test_full_coverage():
    assert check([piece()], tensors(), "float32") == {}
    assert check([piece((0, 1)), piece((1, 4), offset=3)], tensors(), "float32") == {}
    assert check([piece(strides=(12, 1, 4))], tensors(3, 4), "float32") == {}  # transposed storage


@pytest.mark.parametrize(
    ("pieces", "held", "message"),
    [
        ([piece((0, 3))], tensors(), r"w of shape \(4, 3\): the layout covers 9 of 12 elements"),
        ([piece((1, 4), offset=3)], tensors(), "covers 9 of 12"),
        ([piece(), piece((0, 1))], tensors(), "3 of them more than once"),
        ([piece()], tensors(3, 3), r"shape \(3, 3\): the layout's w reaches element 11"),
        ([piece(layers=(0, 3))], tensors(), "writes model.layers.2.w, which the engine does not have"),
        ([piece(layers=(0, 1))], tensors(), "layers.1.w .*covers 0 of 12"),
        ([piece()], tensors(dtype=torch.bfloat16), "float32 is expected"),
        ([piece()], {name: t.T for name, t in tensors(3, 4).items()}, "not contiguous"),
    ],
)
def test_every_fault_is_named(pieces, held, message):
    with pytest.raises(ValueError, match=message):
        check(pieces, held, "float32")


def test_vocabulary_padding_is_found_and_cleared():
    held = {"lm_head.weight": torch.ones(4, 3)}
    padding = check([piece((0, 3), store="lm_head.weight", layers=(0, 1))], held, "float32")
    assert padding == {"lm_head.weight": 9}
    clear_padding(held, padding)
    assert held["lm_head.weight"].sum(1).tolist() == [3, 3, 3, 0]
    assert check([], held, "float32") == {"lm_head.weight": 0}  # a rank with no vocabulary of its own
    with pytest.raises(ValueError, match="covers 9 of 12"):
        check([piece((1, 4), store="lm_head.weight", layers=(0, 1), offset=3)], held, "float32")


class Experts(torch.nn.Module):
    def __init__(self, transposed=False):
        super().__init__()
        shape = (2, 3, 8) if transposed else (2, 8, 3)
        self.w13_weight = torch.nn.Parameter(torch.arange(48.0).reshape(shape))
        self.gate = torch.nn.Linear(3, 2, bias=False)


def test_names_of_older_versions():
    model = torch.nn.Module()
    model.experts = Experts()
    assert sorted(stores(model)) == ["experts.gate.weight", "experts.routed_experts.w13_weight"]
    model.mlp = torch.nn.Module()
    model.mlp.experts = Experts()
    assert "mlp.gate.weight" in stores(model)
    assert not any(tensor.requires_grad for tensor in stores(model).values())


def test_transposed_experts_are_read_off_the_shape():
    for transposed in (False, True):
        assert experts_transposed(stores(Experts(transposed)), 3, on_npu=not transposed) == transposed
    square = {"w13_weight": torch.zeros(2, 4, 4)}
    assert experts_transposed(square, 4, on_npu=True) and not experts_transposed(square, 4, on_npu=False)
    assert not experts_transposed({"w": torch.zeros(2)}, 3, on_npu=True)
    with pytest.raises(ValueError, match="no side of 5"):
        experts_transposed(stores(Experts()), 5, on_npu=False)


def test_transposed_views_become_storage_again():
    model = Experts(transposed=True)
    before = stores(model)
    model.w13_weight = torch.nn.Parameter(model.w13_weight.data.transpose(1, 2))  # what a wake-up leaves
    restore_transposed_experts(model)
    after = stores(model)
    require_stable(before, after)
    assert all(tensor.is_contiguous() and torch.equal(tensor, before[name]) for name, tensor in after.items())
    model.w13_weight = torch.nn.Parameter(model.w13_weight.data.clone())
    with pytest.raises(RuntimeError, match="1 of 2 engine parameters moved"):
        require_stable(before, stores(model))
