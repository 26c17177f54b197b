"""Special functions against eager: every overload, in every dtype that eager has."""

from __future__ import annotations

import pytest
import torch
from check import check

SP = torch.special
BESSEL_K = [f"{scaled}modified_bessel_k{n}" for n in (0, 1) for scaled in ("", "scaled_")]
UNARY = ["i0", "i0e", "i1", "i1e", "erfcx", "spherical_bessel_j0", *BESSEL_K]
KINDS = [f"{shifted}chebyshev_polynomial_{k}" for shifted in ("", "shifted_") for k in "tuvw"]
POLYNOMIALS = [
    *KINDS,
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]
LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_argument(name: str, dtype: torch.dtype) -> None:
    function = getattr(SP, name)
    x = (torch.rand(5, 9) * 4).to(dtype)
    if dtype in LOW and name not in UNARY[:4]:
        with pytest.raises(NotImplementedError):
            function(x)
        return
    check(lambda x: function(x), x)
    check(lambda x: function(x * 2), x[:0])
    check(lambda x: function(x), x[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str, dtype: torch.dtype) -> None:
    function = getattr(SP, name)
    x, n = (torch.randn(9) * 2).to(dtype), torch.arange(-1, 8).to(dtype)
    check(lambda x, n: function(x, n), x, n)
    check(lambda x, n: function(x[:, None], n), x, n)
    check(lambda x: function(x, 3), x)
    check(lambda n: function(0.5, n), n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_zeta_and_the_derivatives_of_log_gamma(dtype: torch.dtype) -> None:
    x = (torch.rand(5, 9) * 6 + 0.1).to(dtype)
    check(lambda x: SP.zeta(x + 1, x), x)
    check(lambda x: SP.zeta(x, 2.5), x)
    check(lambda x: SP.zeta(3.0, x), x)
    for n in (2, 3, 8, 33):
        check(lambda x, n=n: SP.polygamma(n, x), x)
        check(lambda x, n=n: torch.polygamma(n, x), -x)
    check(lambda x: SP.polygamma(2, x), x.long() + 1)
