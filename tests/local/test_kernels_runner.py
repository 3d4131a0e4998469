"""The engine's runner on Triton kernels equals the one on torch: prefill, decode, batches, MXFP4 experts."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, so before they are imported

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.runner import Row
from k3eval_local.engine.triton_runner import TritonRunner
from k3eval_local.kernels.dispatch import KernelUnavailable, Sizes, choose
from k3eval_local.model import K3Config, K3Model
from k3eval_local.model.config import LinearAttnConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet_overflow() -> Iterator[None]:
    with np.errstate(over="ignore"):  # numpy's exp behind tl.sigmoid overflows to inf, which is right
        yield


def small(*, mxfp4: bool = False) -> K3Model:
    """Three layers of every kind: KDA dense, MLA with experts, MLA with experts across a block boundary."""
    config = K3Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        routed_expert_hidden_size=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_token=2,
        attn_res_block_size=2,
        linear_attn=LinearAttnConfig(num_heads=2, head_dim=16, kda_layers=(1,), full_attn_layers=(2, 3)),
    )
    model = K3Model(config).init_weights(0).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                value.normal_(std=0.3)
    if not mxfp4:
        return model
    packed = K3Model(replace(config, mxfp4=True)).eval()
    packed.load_state_dict(
        {k: v for k, v in model.state_dict().items() if "experts.w" not in k}, strict=False
    )
    generator = torch.Generator().manual_seed(1)
    for name, value in packed.named_buffers():
        if name.endswith("_packed"):
            value.copy_(torch.randint(0, 256, value.shape, generator=generator))
        elif name.endswith("_scale"):
            value.fill_(124)
    return packed


def tables(runner: K3Runner) -> list[Row]:
    return [Row(0, np.array([3, 1], dtype=np.int32), 0), Row(1, np.array([2, 0], dtype=np.int32), 0)]


@pytest.mark.parametrize("mxfp4", [False, True], ids=["fp32-experts", "mxfp4-experts"])
def test_triton_runner_equals_torch_runner(mxfp4: bool) -> None:
    model = small(mxfp4=mxfp4)
    ours = TritonRunner(model, memory_budget_bytes=1 << 20, max_batch=2, page_tokens=16, force="triton")
    theirs = K3Runner(model, memory_budget_bytes=1 << 20, max_batch=2, page_tokens=16)
    prompts = [np.arange(5, 24, dtype=np.int32), np.arange(40, 43, dtype=np.int32)]
    with torch.inference_mode():
        for runner in (ours, theirs):
            for slot in range(2):
                runner.reset_state(slot)
        logits = []
        for runner in (ours, theirs):
            rows = tables(runner)
            first = [runner.prefill(rows[0], prompts[0][:7], last=False)]
            first = [runner.prefill(replace(rows[0], cached=7), prompts[0][7:], last=True)]
            first.append(runner.prefill(rows[1], prompts[1], last=True))
            steps = [
                runner.decode([replace(rows[0], cached=19 + k), replace(rows[1], cached=3 + k)], [9 + k, 11])
                for k in range(2)
            ]
            logits.append(torch.cat([torch.stack([x for x in first if x is not None]), *steps]))
    assert (logits[0] - logits[1]).abs().max().item() < 2e-5
    assert torch.isfinite(logits[0]).all()


def test_forced_torch_is_the_torch_runner() -> None:
    model = small()
    forced = TritonRunner(model, memory_budget_bytes=1 << 20, max_batch=1, page_tokens=16, force="torch")
    plain = K3Runner(model, memory_budget_bytes=1 << 20, max_batch=1, page_tokens=16)
    row, prompt = Row(0, np.array([0], dtype=np.int32), 0), np.arange(5, dtype=np.int32)
    with torch.inference_mode():
        a, b = (runner.prefill(row, prompt, last=True) for runner in (forced, plain))
    assert a is not None
    assert b is not None
    assert torch.equal(a, b)


def test_dispatch_table() -> None:
    good = Sizes(head=64, rank=128)
    assert not choose("kda_decode", CPU, torch.float32, good)  # the reference serves a CPU
    assert choose("kda_decode", CPU, torch.float32, good, "triton")  # in the interpreter
    assert not choose("kda_decode", CPU, torch.float32, good, "torch")
    cuda = torch.device("cuda")
    assert choose("kda_prefill", cuda, torch.bfloat16, good)
    assert not choose("kda_prefill", cuda, torch.bfloat16, Sizes(head=64, rank=128, bound=None))
    assert not choose("mla_decode", cuda, torch.float16, good)
    with pytest.raises(KernelUnavailable, match="power of two"):
        choose("kda_decode", CPU, torch.float32, Sizes(head=48), "triton")
    with pytest.raises(KernelUnavailable, match="bounded"):
        choose("kda_prefill", CPU, torch.float32, Sizes(head=64, bound=None), "triton")
    with pytest.raises(KernelUnavailable, match="fp32 nor bf16"):
        choose("moe", CPU, torch.float64, Sizes(), "triton")
