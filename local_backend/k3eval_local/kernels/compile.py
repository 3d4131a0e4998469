"""Compile every kernel ahead of time, without a GPU: registers, spills and shared memory for sm_80 and sm_90.

``python -m k3eval_local.kernels.compile [--out results/kernels-aot]`` writes the table as JSON and Markdown.
Each row is one kernel at one real shape (Kimi K3's own head sizes). Triton's compiler makes the PTX; the
assembler that Triton ships reports what the kernel uses.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3eval_local.kernels import attn_res, kda_decode, kda_prefill, mla_decode, mla_prefill, moe, norm, situ

TARGETS = (80, 90)


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. pointers: element type by argument, as Triton spells it (``*bf16``)."""

    name: str
    kernel: triton.JITFunction
    types: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs. spill_bytes: a thread's stack and local memory, where spilled
    registers lie.
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int


def _types(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def cases() -> tuple[Case, ...]:
    """Every kernel, at Kimi K3's head sizes, bf16 with fp32 state."""
    chunk = _types("q_ptr k_ptr v_ptr z_ptr beta_ptr qg_ptr kd_ptr w_ptr u_ptr aqk_ptr", "*bf16")
    chunk |= _types("bias_ptr rate_ptr decay_ptr", "*fp32") | _types("start_ptr end_ptr", "*i64")
    chunk |= _types("stride stride_v stride_beta heads", "i32") | _types("bound scale", "fp32")
    scan = _types("qg_ptr kd_ptr w_ptr u_ptr aqk_ptr o_ptr", "*bf16")
    scan |= _types("decay_ptr initial_ptr final_ptr", "*fp32") | _types("first_ptr cu_ptr", "*i64")
    scan |= _types("stride_o heads", "i32")
    decode = _types("x_ptr z_ptr beta_ptr gate_ptr conv_ptr out_ptr", "*bf16") | {"slot_ptr": "*i32"}
    decode |= _types("state_ptr weight_ptr rate_ptr bias_ptr norm_ptr", "*fp32")
    decode |= _types(
        "stride_x stride_z stride_beta stride_gate stride_slot stride_tap stride_state stride_out", "i32"
    )
    decode |= {"heads": "i32"} | _types("scale bound eps", "fp32")
    split = _types("q_ptr cache_ptr", "*bf16") | _types("table_ptr length_ptr", "*i32")
    split |= _types("part_ptr peak_ptr", "*fp32")
    split |= _types("stride_q stride_head stride_table heads splits", "i32") | {"scale": "fp32"}
    merge = _types("part_ptr peak_ptr", "*fp32") | {"out_ptr": "*bf16", "splits": "i32"}
    flash = _types("q_ptr k_ptr slot_ptr v_ptr o_ptr", "*bf16") | _types("cu_q_ptr cu_k_ptr", "*i64")
    flash |= _types("stride_q stride_k stride_slot stride_v stride_o", "i32") | {"scale": "fp32"}
    router = _types("x_ptr w_ptr", "*bf16") | _types("bias_ptr share_ptr score_ptr", "*fp32")
    router |= {"index_ptr": "*i32", "scaling": "fp32"} | _types("stride_x width experts", "i32")
    up = _types("z_ptr h_ptr", "*bf16") | _types("pair_ptr expert_ptr", "*i32")
    up |= _types("stride_z latent inner top", "i32")
    down = {"h_ptr": "*bf16", "share_ptr": "*fp32", "y_ptr": "*fp32"} | _types("pair_ptr expert_ptr", "*i32")
    down |= _types("latent inner", "i32")
    plain, packed = "*bf16", "*u8"
    up_weights, down_weights = "w1_ptr w3_ptr s1_ptr s3_ptr", "w2_ptr s2_ptr"
    tiles: dict[str, object] = {"BF": 64, "BK": 64, "UP": False}
    betas: dict[str, object] = {"beta_gate": 4.0, "beta_up": 25.0}
    mix = _types("bank_ptr partial_ptr mixed_ptr out_ptr norm_ptr", "*bf16") | {
        "query_ptr": "*fp32",
        "eps": "fp32",
    }
    mix |= _types("stride_source stride_bank stride_partial stride_mixed stride_out width", "i32")
    rms = (
        _types("x_ptr weight_ptr y_ptr", "*bf16") | _types("stride_x stride_y width", "i32") | {"eps": "fp32"}
    )
    glu = _types("x_ptr y_ptr", "*bf16") | _types("stride_x stride_y width", "i32")
    state_bf16 = decode | {"state_ptr": "*bf16"}
    return (
        Case(
            "kda_prefill chunk",
            kda_prefill._chunk_kernel,
            chunk,
            {"NORMALISE": True, "K": 128, "BK": kda_prefill.CHUNK_COLUMNS, "PREC": "tf32"},
            warps=kda_prefill.CHUNK_WARPS,
        ),
        Case(
            "kda_prefill scan",
            kda_prefill._scan_kernel,
            scan,
            {"INITIAL": True, "K": 128, "BV": 64, "UP": False},
            warps=kda_prefill.SCAN_WARPS,
            stages=kda_prefill.SCAN_STAGES,
        ),
        Case(
            "kda_prefill scan, few heads",
            kda_prefill._scan_kernel,
            scan,
            {"INITIAL": True, "K": 128, "BV": 32, "UP": False},
            warps=kda_prefill.SCAN_WARPS,
            stages=kda_prefill.SCAN_STAGES,
        ),
        Case(
            "kda_decode, fp32 state", kda_decode._decode_kernel, decode, {"BOUNDED": True, "K": 128}, warps=8
        ),
        Case(
            "kda_decode, bf16 state",
            kda_decode._decode_kernel,
            state_bf16,
            {"BOUNDED": True, "K": 128},
            warps=8,
        ),
        Case(
            "mla_decode split",
            mla_decode._split_kernel,
            split,
            {"R": 512, "SLOT": 64, "SLOT_PAD": 64, "PAGE": 64, "BLOCK": 32, "HB": 16, "UP": False},
            stages=2,
        ),
        Case("mla_decode merge", mla_decode._merge_kernel, merge, {"R": 512, "SPLITS": 64}),
        Case(
            "mla_prefill",
            mla_prefill._prefill_kernel,
            flash,
            {"N": 128, "SLOT": 64, "SLOT_PAD": 64, "V": 128, "BM": 64, "BN": 64, "UP": False},
            warps=8,
            stages=2,
        ),
        Case("moe router", moe._router_kernel, router, {"TOP": 16, "EXPERTS": 1024, "BLOCK": 16}, warps=8),
        Case("moe up", moe._up_kernel, up | _types(up_weights, plain), {**betas, "PACKED": False, **tiles}),
        Case(
            "moe up, MXFP4",
            moe._up_kernel,
            up | _types(up_weights, packed),
            {**betas, "PACKED": True, **tiles},
        ),
        Case("moe down", moe._down_kernel, down | _types(down_weights, plain), {"PACKED": False, **tiles}),
        Case(
            "moe down, MXFP4",
            moe._down_kernel,
            down | _types(down_weights, packed),
            {"PACKED": True, **tiles},
        ),
        Case(
            "moe sum",
            moe._sum_kernel,
            {"y_ptr": "*fp32", "u_ptr": "*bf16", "latent": "i32"},
            {"TOP": 16, "BLOCK": 1024},
        ),
        Case("attn_res mix", attn_res._mix_kernel, mix, {"SOURCES": 8, "NORM": True, "BLOCK": 8192}, warps=8),
        Case("rmsnorm", norm._rmsnorm_kernel, rms, {"BLOCK": 8192}, warps=8),
        Case("situ_glu", situ._situ_kernel, glu, {**betas, "BLOCK": 1024}),
    )


def measure(case: Case, capability: int) -> Usage:
    """Compile one case for one architecture and read the assembler's report.

    Raises:
        RuntimeError: the assembler refuses the kernel.
    """
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    # rows of real tensors are aligned, which the launcher would find out at run time
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
        or name.startswith("stride")
        or name in ("latent", "inner", "width")
    }
    source = ASTSource(case.kernel, signature, constexprs=dict(case.constants), attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        done = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", str(cubin)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout)
    if used is None:
        raise RuntimeError(
            f"{case.name}: no resource usage in the compiled kernel: {done.stderr.strip()[:400]}"
        )
    registers, stack, _, local = (int(value) for value in used.groups())
    shared = int(compiled.metadata.shared)
    return Usage(case.name, f"sm_{capability}", registers, stack + local, shared, case.warps)


def measure_all() -> tuple[Usage, ...]:
    """All cases on all targets."""
    return tuple(measure(case, target) for case in cases() for target in TARGETS)


def write_table(rows: Sequence[Usage], stem: Path) -> None:
    """``STEM.json`` and ``STEM.md``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    facts = {"command": "python -m k3eval_local.kernels.compile", "triton": triton.__version__}
    stem.with_suffix(".json").write_text(
        json.dumps({**facts, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}, indent=2)
        + "\n"
    )
    lines = [
        "# Kernels compiled ahead of time",
        "",
        f"`{facts['command']}`, Triton {triton.__version__}, no GPU.",
        "Spill bytes: stack and local memory of a thread.",
        "",
        "| kernel | target | warps | registers | spill bytes | shared bytes |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r.kernel} | {r.target} | {r.warps} | {r.registers} | {r.spill_bytes} | {r.shared_bytes} |"
            for r in rows
        ),
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _tool(name: str) -> str:
    """A program of the NVIDIA back end that Triton ships."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m k3eval_local.kernels.compile", description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="write STEM.json and STEM.md; else print JSON")
    options = parser.parse_args(arguments)
    rows = measure_all()
    if options.out is None:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        write_table(rows, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
