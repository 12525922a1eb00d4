"""The engine's steps at the size of real models, compiled by the real TPU and GPU compilers for devices that are not here.

Abstract weights: nothing is allocated. What is asserted is the compiler's own account: the pools are updated in place (alias bytes),
nothing as large as one layer's pool is copied (temporaries), and everything fits the device.
"""

import dataclasses
import functools

import gpu_aot
import jax
import jax.numpy as jnp
import pytest
import tpu_aot

from jaxkv.io.hf_config import config_from_hf
from jaxkv.kv import pages
from jaxkv.kv.state import default_page_size, empty_pools
from jaxkv.model.decoder import Kernels
from jaxkv.model.params import Storage, abstract_params
from jaxkv.planning.presets import PRESETS
from jaxkv.sampling import Sampling
from jaxkv.state import Static
from jaxkv.steps import COMPILER_OPTIONS, Loop, Pools, decode_many, prefill_step
from pallas_kernels import DEVICES

# Slots, tokens a slot and weights that a 16 GB v5e holds: 8B weights only in 8 bits. One layer's pool is larger than what a step's own
# values take, Gemma's sampling over 262,144 tokens among them, so that a copy of it shows.
SIZES = {"llama-3.1-8b": (8, 4096), "gemma-3-1b": (8, 32768)}
TPUS, GPUS = tuple(tpu_aot.TOPOLOGIES), ("h200",)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one device, with what its steps take."""

    model: str
    device: str
    kv_dtype: str = "bfloat16"

    @property
    def config(self):
        return config_from_hf(PRESETS[self.model], self.model)

    @property
    def spec(self):
        return DEVICES[self.device]

    @property
    def weights(self):
        return "int8" if (self.model, self.device) == ("llama-3.1-8b", "v5e") else "bfloat16"

    @property
    def storage(self):
        return Storage(self.weights, "bfloat16", self.spec.platform)

    @property
    def static(self):
        return Static(self.config, "bfloat16", Kernels(device=self.spec))

    def state(self):
        """(params, Pools, Ownership) without data."""
        slots, tokens = SIZES[self.model]
        page_size = default_page_size(self.config, self.spec.platform)
        per_slot = tokens // page_size
        make = lambda: empty_pools(self.config, slots * per_slot + 1, page_size, self.kv_dtype, self.spec.platform)
        pools = Pools(*jax.eval_shape(make), jax.ShapeDtypeStruct((slots, tokens), jnp.int32))
        own = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, pages.empty(slots, per_slot, slots * per_slot + 1, page_size)))
        return abstract_params(self.config, self.storage), pools, own

    def compile(self, function, *args, donate):
        """memory_analysis() of `function`, compiled for the device."""
        if self.spec.platform == "tpu":
            options = COMPILER_OPTIONS["tpu"]
            return tpu_aot.compile_for(self.device, function, *args, donate=donate, options=options).memory_analysis()
        spec = lambda a: gpu_aot.spec(self.device, a.shape, a.dtype)
        return gpu_aot.compile_for(self.device, function, *jax.tree.map(spec, args), donate_argnums=donate).memory


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def prefill(case: Case, rows: int, T: int):
    params, pools, own = case.state()
    run = functools.partial(prefill_step, static=case.static, all_logits=False)
    M = own.page_table.shape[1]
    return pools, case.compile(run, params, pools, i32(rows, M), i32(rows), i32(rows), i32(rows, T), i32(rows), donate=(1,))


def decode(case: Case):
    params, pools, own = case.state()
    B = own.lengths.shape[0]
    shape = lambda dtype: jax.ShapeDtypeStruct((B,), dtype)
    loop = Loop(pools, own, shape(jnp.int32), shape(jnp.bool_), i32())
    options = Sampling().arrays(
        num_slots=B, rows=range(B), vocab_size=case.config.vocab_size, eos_token_ids=(), seeds=[0] * B, prompt_lengths=[1] * B
    )
    run = functools.partial(decode_many, static=case.static, looped=True)
    return pools, case.compile(run, params, loop, options, shape(jnp.bool_), i32(), donate=(1,))


def check(case: Case, pools: Pools, memory, activations: int = 0):
    """`activations`: bytes that the step's own values may take besides one layer's keys."""
    kv_bytes = sum(a.size * a.dtype.itemsize for a in (pools.k_pages, pools.v_pages, pools.kv_scales) if a is not None)
    layer_bytes = pools.k_pages.size * pools.k_pages.dtype.itemsize // case.config.num_layers
    assert memory.alias_size_in_bytes >= kv_bytes
    assert memory.temp_size_in_bytes < layer_bytes + activations, f"{memory.temp_size_in_bytes:,} over {layer_bytes:,}"
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    assert total < case.spec.hbm_bytes


CASES = [Case(model, device) for model in SIZES for device in (*TPUS, *GPUS)]
INT8 = [Case("llama-3.1-8b", device, "int8") for device in ("v5e", "h200")]  # 8-bit pools: the loop on one, the chunk on the other
pytestmark = [pytest.mark.aot, tpu_aot.needs_libtpu]


@pytest.fixture(autouse=True)
def compilers(request):
    case = request.getfixturevalue("case")
    if case.spec.platform == "gpu" and (reason := gpu_aot.missing()):
        pytest.skip(reason)


@pytest.mark.parametrize("case", [*CASES, INT8[0]], ids=lambda c: f"{c.model}-{c.device}-{c.kv_dtype}")
def test_decode_is_in_place_and_fits(case):
    """The whole loop: forward, sampling, stop, page reservation."""
    check(case, *decode(case))


@pytest.mark.parametrize("case", [*CASES, INT8[1]], ids=lambda c: f"{c.model}-{c.device}-{c.kv_dtype}")
def test_prefill_is_in_place_and_fits(case):
    T, config = 512, case.config
    pools, memory = prefill(case, rows=1, T=T)
    new_kv = 2 * config.num_layers * T * config.num_kv_heads * config.head_dim * 4
    check(case, pools, memory, activations=new_kv + 8 * T * 2 * config.mlp_dim * 4)
