"""What `Sampling` accepts, refuses and turns into arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxkv.sample_step import MAX_BIAS, MAX_STOP
from jaxkv.sampling import Sampling


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", [0.5, -1]),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", 3),
        ("seed", -1),
        ("seed", 2**32),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("n", 0),
        ("n", [1, 2]),
        ("n", None),
        ("max_new_tokens", -1),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [{1: "x"}]),
        ("logit_bias", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [["a"], [""]]),
        ("stop", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [1.5]),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": [0.5]}, "temperature has 1 entries for 2 rows"),
        ({"stop_token_ids": [[1], [2], [3]]}, "stop_token_ids has 3 entries for 2 rows"),
        ({"logit_bias": [{}]}, "logit_bias has 1 entries for 2 rows"),
        ({"seed": [1, 2, 3]}, "seed has 3 entries for 2 rows"),
        ({"logit_bias": {10: 1.0}}, "token id 10, outside the vocabulary of 0 to 9"),
        ({"logit_bias": {-1: 1.0}}, "token id -1"),
        ({"stop_token_ids": [10]}, "stop_token_ids holds token id 10"),
    ],
)
def test_arrays_refuse_what_does_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options).arrays(num_slots=3, rows=[0, 2], vocab_size=10, eos_token_ids=(1,), seeds=[0, 0], prompt_lengths=[0, 0])


def test_arrays_refuse_too_many_tokens():
    def build(**options):
        return Sampling(**options).arrays(num_slots=1, rows=[0], vocab_size=9999, eos_token_ids=(0,), seeds=[0], prompt_lengths=[0])

    build(logit_bias=dict.fromkeys(range(MAX_BIAS), 1.0), stop_token_ids=list(range(MAX_STOP)))
    with pytest.raises(ValueError, match=f"logit_bias has {MAX_BIAS + 1} tokens"):
        build(logit_bias=dict.fromkeys(range(MAX_BIAS + 1), 1.0))
    with pytest.raises(ValueError, match=f"stop_token_ids has {MAX_STOP + 1} tokens"):
        build(stop_token_ids=list(range(1, MAX_STOP + 1)))


def test_arrays_put_each_row_at_its_slot():
    arrays = Sampling(
        temperature=np.array([0.5, 0.0]),
        top_k=[3, -1],
        seed=[5, None],
        stop_token_ids=[[4], []],
        logprobs=[None, 2],
        n=2,
    ).arrays(
        num_slots=6,
        rows=[4, 1, 0, 3],
        vocab_size=10,
        eos_token_ids=(9,),
        seeds=[50, 51, 52, 53],
        prompt_lengths=[7, 7, 8, 8],
        max_tokens=[20, 20, 30, 30],
    )
    assert arrays.temperature.tolist() == [0, 0.5, 0, 0, 0.5, 0]
    assert arrays.top_k.tolist() == [-1, 3, 0, -1, 3, 0]
    assert arrays.seeds[[4, 0, 3]].tolist() == [5, 52, 53] and arrays.seeds[1] not in (5, 6, 51)
    assert arrays.stop_ids[:, :2].tolist() == [[9, -1], [4, 9], [-1, -1], [9, -1], [4, 9], [-1, -1]]
    assert arrays.num_logprobs.tolist() == [2, -1, -1, 2, -1, -1]
    assert arrays.prompt_lengths.tolist() == [8, 7, 0, 8, 7, 0]
    assert arrays.max_tokens[[4, 0]].tolist() == [20, 30]
    dtypes = {name: str(getattr(arrays, name).dtype) for name in ("temperature", "top_k", "seeds", "stop_ids", "bias_values")}
    assert dtypes == {"temperature": "float32", "top_k": "int32", "seeds": "uint32", "stop_ids": "int32", "bias_values": "float32"}


def test_samples_of_seeds_in_a_row_all_differ():
    arrays = Sampling(seed=[0, 1, 2, 3], n=4).arrays(
        num_slots=16, rows=range(16), vocab_size=10, eos_token_ids=(), seeds=[9] * 16, prompt_lengths=[0] * 16
    )
    assert arrays.seeds[::4].tolist() == [0, 1, 2, 3] and len(set(arrays.seeds.tolist())) == 16


def test_what_a_sampling_says_of_itself():
    assert not Sampling().is_random and Sampling(temperature=[0, 1]).is_random
    assert Sampling(temperature=1, seed=[None, 3]).needs_seeds and not Sampling(temperature=1, seed=3).needs_seeds
    assert not Sampling().wants_logprobs and Sampling(logprobs=0).wants_logprobs
    assert Sampling(stop="a").stop_strings(1, 2) == ("a",) == Sampling(stop=[["b"], "a"]).stop_strings(1, 2)
    assert Sampling(stop=["a", "b"]).stop_strings(0, 1) == ("a", "b") and Sampling().stop_strings(0, 3) == ()
    assert Sampling(top_k=[1, 2]) == Sampling(top_k=(1, 2)) == Sampling(top_k=np.array([1, 2]))
