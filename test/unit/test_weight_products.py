"""Products with packed matrices against the dequantized matrix in fp64."""

import pytest
import torch

from rwkv_batch.ops.weights import products
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.products import int8_product, product_with

# [outputs, inputs], and whether torch's int8 product, with activations in bf16, takes it
SHAPES = {(64, 32): True, (300, 128): True, (513, 224): True, (7, 5): False, (257, 77): False, (1, 1): False}
EXACT, BF16 = 1e-6, 4e-3  # of a product's norm


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_dequantized_matrix(name, shape):
    torch.manual_seed(0)
    weight, x, bias = FORMATS[name].pack(torch.randn(shape)), torch.randn(19, shape[1]), torch.randn(shape[0])
    plain = x.double() @ weight.dequantize().double().T
    tolerance = BF16 if name == "int8" and SHAPES[shape] else EXACT
    assert off(product_with(weight)(x), plain) < tolerance
    assert off(product_with(weight, bias)(x), plain + bias) < tolerance
    assert product_with(weight)(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_product_beside_any_others(name, shape):
    torch.manual_seed(0)
    product, x = (
        product_with(FORMATS[name].pack(torch.randn(shape)), invariant=True),
        torch.randn(40, shape[1]),
    )
    together = product(x)
    for first in (0, 1, 7, 16, 31):
        for count in (1, 2, 3, 9, 17):
            some = x[first : first + count]
            assert torch.equal(product(some), together[first : first + count])
            assert torch.equal(product(some.flip(0)), together[first : first + count].flip(0))


def test_int8_without_torchs_product_is_exact(monkeypatch):
    monkeypatch.setattr(products, "INT8_INPUTS", 65)  # which 64 are no multiple of
    weight, x, bias = FORMATS["int8"].pack(torch.randn(90, 64)), torch.randn(5, 64), torch.randn(90)
    product = int8_product(weight.parts["values"], weight.parts["scales"], bias)
    assert off(product(x), x.double() @ weight.dequantize().double().T + bias) < EXACT
