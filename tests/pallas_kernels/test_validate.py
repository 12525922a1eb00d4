"""What the ops refuse, by name and with numbers, eagerly and while tracing."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import paged_decode, paged_prefill

B, T, K, G, H, P, M, ROWS = 4, 2, 2, 3, 8, 4, 5, 81


def good():
    """Arguments of paged_prefill that fit together."""
    floats = lambda *shape: np.ones(shape, np.float32)
    whole = lambda *shape: np.ones(shape, np.int32)
    return {
        "q": floats(B, T, K, G, H),
        "k_pages": floats(ROWS, K, P, H),
        "v_pages": floats(ROWS, K, P, H),
        "page_table": whole(B, M),
        "lengths": whole(B),
        "chunk_lengths": whole(B),
        "k_new": floats(B, T, K, H),
        "v_new": floats(B, T, K, H),
        "scale": 1.0,
    }


def bad(**changes):
    """The same with some replaced; a callable changes the good one."""
    args = good()
    return args | {name: new(args[name]) if callable(new) else new for name, new in changes.items()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": lambda x: x[:, 0]}, ValueError, r"q has shape \(4, 2, 3, 8\), expected .*\[B, T, K, G, H\]"),
        ({"q": lambda x: x.astype(np.int32)}, TypeError, "q must be floating point, got int32"),
        ({"k_pages": lambda x: x[0]}, ValueError, r"k_pages has shape \(2, 4, 8\), expected \[L\*C, K, P, H\]"),
        ({"k_pages": lambda x: x[:, :1]}, ValueError, r"k_pages has shape \(81, 1, 4, 8\), expected \(any, 2, any, 8\)"),
        ({"k_pages": lambda x: x[..., :6]}, ValueError, r"k_pages has shape \(81, 2, 4, 6\), expected \(any, 2, any, 8\)"),
        ({"v_pages": lambda x: x[:, :, :2]}, ValueError, r"v_pages has shape \(81, 2, 2, 8\), expected \(81, 2, 4, 8\)"),
        ({"v_pages": lambda x: x.astype(np.float16)}, TypeError, "k_pages is float32 and v_pages float16"),
        ({"k_pages": lambda x: x.astype(np.int8), "v_pages": lambda x: x.astype(np.int8)}, TypeError, "int8.*one of float32"),
        ({"page_table": lambda x: x[:3]}, ValueError, r"page_table has shape \(3, 5\), expected \(4, any\)"),
        ({"page_table": lambda x: x[:, 0]}, ValueError, r"page_table has shape \(4,\), expected \(4, any\)"),
        ({"page_table": lambda x: x.astype(np.uint32)}, TypeError, "page_table must be int32, got uint32"),
        ({"lengths": lambda x: x[:1]}, ValueError, r"lengths has shape \(1,\), expected \(4\)"),
        ({"lengths": lambda x: x.astype(np.int16)}, TypeError, "lengths must be int32, got int16"),
        ({"chunk_lengths": lambda x: x[:, None]}, ValueError, r"chunk_lengths has shape \(4, 1\), expected \(4\)"),
        ({"chunk_lengths": lambda x: x.astype(np.float32)}, TypeError, "chunk_lengths must be int32, got float32"),
        ({"k_new": lambda x: x[:, :1]}, ValueError, r"k_new has shape \(4, 1, 2, 8\), expected \(4, 2, 2, 8\)"),
        ({"v_new": lambda x: x[..., :4]}, ValueError, r"v_new has shape \(4, 2, 2, 4\), expected \(4, 2, 2, 8\)"),
        ({"v_new": None}, ValueError, "paged_prefill needs k_new and v_new"),
        ({"soft_cap": 0.0}, ValueError, r"soft_cap must be positive or None, got 0\.0"),
        ({"soft_cap": -1.5}, ValueError, r"soft_cap must be positive or None, got -1\.5"),
        ({"window": -3}, ValueError, "window must be 0 .* got -3"),
        ({"window": np.int32(-3)}, ValueError, "window must be 0 .* got -3"),
        ({"window": 2.5}, TypeError, r"window must be one whole number, got float 2\.5"),
        ({"window": True}, TypeError, "window must be one whole number, got bool True"),
        ({"window": np.zeros(4, np.int32)}, TypeError, r"window must be one whole number, got int32 of shape \(4,\)"),
        ({"page_offset": np.zeros(4, np.int32)}, TypeError, r"page_offset must be one whole number, got int32 of shape"),
        ({"implementation": "cuda"}, ValueError, "implementation 'cuda' is not one of reference, xla"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_and_number(changes, error, message):
    with pytest.raises(error, match=message):
        paged_prefill(**bad(**changes))
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(paged_prefill, **bad(**changes)))


def shapes(op, **args):
    return jax.tree.map(lambda a: (a.shape, a.dtype), jax.eval_shape(functools.partial(op, **args)))


def test_what_the_refusals_start_from_is_accepted():
    o = ((B, T, K, G, H), np.float32)
    assert shapes(paged_prefill, **good()) == o
    assert shapes(paged_prefill, **good(), return_lse=True) == (o, ((B, T, K, G), np.float32))
    decode = {name: x[:, 0] if name in ("q", "k_new", "v_new") else x for name, x in good().items() if name != "chunk_lengths"}
    assert shapes(paged_decode, **decode) == ((B, K, G, H), np.float32)
    assert shapes(paged_decode, **decode, return_lse=True) == (((B, K, G, H), np.float32), ((B, K, G), np.float32))


def test_decode_names_its_own_layout():
    case = {k: v for k, v in good().items() if k != "chunk_lengths"}
    with pytest.raises(ValueError, match="k_new and v_new go together"):
        paged_decode(**dict(case, q=case["q"][:, 0], k_new=None))
    with pytest.raises(ValueError, match=r"q has shape \(4, 2, 2, 3, 8\), expected \[B, K, G, H\]"):
        paged_decode(**case)
