"""What is expected of an operator that is not simply eager's result, each with its reason.

What comes in: the name of an operator of the database, a dtype, a way to run it. What goes out: how to judge
it, or the reason why it fails. What holds: a reason is a fact about PyTorch or about mathematics, never about
hotloop not being ready.

Next: table.py.
"""

from __future__ import annotations

__all__ = ["DTYPES", "is_arbitrary", "reason", "unjudged", "without_strides"]

DTYPES = (
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16",
    "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip

#: Their values are not determined by the arguments.
_ARBITRARY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
#: Results that float64 cannot judge: bases are determined only up to signs and rotations, and neighbours are
#: those of the dtype. They are compared with eager alone.
_NO_REFERENCE = (
    "linalg.eig", "linalg.svd", "svd", "pca_lowrank", "geqrf", "linalg.qr", "qr", "frexp", "nextafter",
)  # fmt: skip
#: Operators whose strides PyTorch announces (to whoever compiles) otherwise than its CPU kernel makes them.
#: (Of transforms only where PyTorch has MKL.)
_OTHER_STRIDES = ("nn.functional.max_unpool", "fft.", "unique_consecutive")

#: (operator, or the beginning of its name with *), (dtypes), (ways), and the reason.
_EXPECTED: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        (
            "nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic",
            "nn.functional.upsample_bilinear",
        ),
        ("uint8",),
        (),
        "PyTorch's decomposition, which capture uses, rounds halves to even where its kernel for images "
        "rounds them up",
    ),
    (
        ("to_sparse",),
        (),
        ("backward",),
        "AOTAutograd by itself gives the result no gradient; below Dynamo it does",
    ),
    (
        ("unique_consecutive",),
        (),
        ("dynamic",),
        "PyTorch announces wrong sizes to compilers where the dimension is negative: an error says so",
    ),
    (
        ("index_fill",),
        (),
        ("backward",),
        "torch 2.11 announces as many unique elements as there are elements: an error says so",
    ),
)  # fmt: skip


def is_arbitrary(operator: str) -> bool:
    """Whether the values of its result mean nothing."""
    return operator in _ARBITRARY


def unjudged(operator: str) -> bool:
    """Whether float64 cannot tell who is closer."""
    return operator.startswith(_NO_REFERENCE)


def without_strides(operator: str) -> bool:
    """Whether the strides of its result are not what PyTorch says they are."""
    return operator.startswith(_OTHER_STRIDES)


def reason(operator: str, dtype: str, mode: str) -> str | None:
    """Why a failure is expected; ``None`` where it is a fault."""
    for operators, dtypes, modes, text in _EXPECTED:
        fits = any(operator == o or (o.endswith("*") and operator.startswith(o[:-1])) for o in operators)
        if fits and (not dtypes or dtype in dtypes) and (not modes or mode in modes):
            return text
    return None
