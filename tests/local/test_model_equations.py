"""The model against a second implementation: the equations in NumPy, fp64, one token at a time.

It shares no code with the package and reads the weights from the checkpoint under their published names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_helpers import random_ids, shaken
from numpy.typing import NDArray
from safetensors.numpy import load_file

from k3eval_local.checkpoint import load, save
from k3eval_local.model.config import K3Config

Array = NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rms(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / np.sqrt((x * x).mean() + eps)


class Reference:
    """One sequence through the checkpoint in ``folder``."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.c: dict[str, Any] = config["text_config"]
        self.k: dict[str, Any] = self.c["linear_attn_config"]
        self.w: dict[str, Array] = {}
        for shard in folder.glob("*.safetensors"):
            self.w |= {name: array.astype(np.float64) for name, array in load_file(shard).items()}
        self.eps = self.c["rms_norm_eps"]
        self.memory: dict[tuple[int, str], Any] = {}

    def layer(self, index: int, name: str) -> Array:
        return self.w[f"language_model.model.layers.{index}.{name}"]

    def mix(self, rows: list[Array], norm: Array, query: Array) -> Array:
        scores = np.array([(query[0] * rms(row, norm, self.eps)).sum() for row in rows])
        weights = np.exp(scores - scores.max())
        return sum(w * row for w, row in zip(weights / weights.sum(), rows, strict=True))  # type: ignore[return-value]

    def situ(self, x: Array, gate: Array, up: Array, down: Array) -> Array:
        b1, b2 = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        a, b = gate @ x, up @ x
        return down @ (b1 * np.tanh(a / b1) * sigmoid(a) * b2 * np.tanh(b / b2))

    def kda(self, index: int, x: Array) -> Array:
        def w(name: str) -> Array:
            return self.layer(index, f"self_attn.{name}")

        H, D = self.k["num_heads"], self.k["head_dim"]
        streams = []
        for name in "qkv":
            history = self.memory.setdefault((index, name), [np.zeros(H * D)] * 3)
            window = [*history, w(f"{name}_proj.weight") @ x]
            self.memory[index, name] = window[1:]
            y = sum(w(f"{name}_conv1d.weight")[:, 0, i] * window[i] for i in range(4))
            streams.append((y * sigmoid(y)).reshape(H, D))
        q, k, v = streams
        beta = sigmoid(w("b_proj.weight") @ x)
        z = (w("f_b_proj.weight") @ (w("f_a_proj.weight") @ x) + w("dt_bias")).reshape(H, D)
        out = np.zeros((H, D))
        state = self.memory.setdefault((index, "S"), np.zeros((H, D, D)))
        for h in range(H):
            q_h = q[h] / np.sqrt((q[h] ** 2).sum() + 1e-6) * D**-0.5
            k_h = k[h] / np.sqrt((k[h] ** 2).sum() + 1e-6)
            rate, bound = np.exp(w("A_log")[h]), self.k["gate_lower_bound"]
            g = -rate * np.log1p(np.exp(z[h])) if bound is None else bound * sigmoid(rate * z[h])
            decayed = np.diag(np.exp(g)) @ state[h]
            update = np.eye(D) - beta[h] * np.outer(k_h, k_h)
            state[h] = update @ decayed + beta[h] * np.outer(k_h, v[h])
            out[h] = rms(state[h].T @ q_h, w("o_norm.weight"), self.eps)
        return w("o_proj.weight") @ (sigmoid(w("g_proj.weight") @ x) * out.reshape(-1))

    def mla(self, index: int, x: Array) -> Array:
        def w(name: str) -> Array:
            return self.layer(index, f"self_attn.{name}")

        H, n, s = self.c["num_attention_heads"], self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"]
        r, v = self.c["kv_lora_rank"], self.c["v_head_dim"]
        q = w("q_b_proj.weight") @ rms(w("q_a_proj.weight") @ x, w("q_a_layernorm.weight"), self.eps)
        both = w("kv_a_proj_with_mqa.weight") @ x
        cache = self.memory.setdefault((index, "cache"), [])
        cache.append((rms(both[:r], w("kv_a_layernorm.weight"), self.eps), both[r:]))
        expand = w("kv_b_proj.weight").reshape(H, n + v, r)
        heads = []
        for h, query in enumerate(q.reshape(H, n + s)):
            scores = [query[:n] @ (expand[h, :n] @ c) + query[n:] @ slot for c, slot in cache]
            p = np.exp((np.array(scores) - max(scores)) / np.sqrt(n + s))
            heads.append(
                sum(p_j * (expand[h, n:] @ c) for p_j, (c, _) in zip(p / p.sum(), cache, strict=True))
            )
        return w("o_proj.weight") @ (sigmoid(w("g_proj.weight") @ x) * np.concatenate(heads))

    def moe(self, index: int, x: Array) -> Array:
        def w(name: str) -> Array:
            return self.layer(index, f"block_sparse_moe.{name}")

        scores = sigmoid(w("gate.weight") @ x)
        biased = scores + w("gate.e_score_correction_bias")
        chosen = np.argsort(-biased, kind="stable")[: self.c["num_experts_per_token"]]
        z = w("routed_expert_down_proj.weight") @ x
        u = np.zeros_like(z)
        for e in chosen:
            gate, up, down = (w(f"experts.{e}.{name}.weight") for name in ("w1", "w3", "w2"))
            u += scores[e] / (scores[chosen].sum() + 1e-20) * self.situ(z, gate, up, down)
        gate, up, down = (w(f"shared_experts.{name}_proj.weight") for name in ("gate", "up", "down"))
        normed = rms(u, w("routed_expert_norm.weight"), self.eps)
        return self.situ(x, gate, up, down) + w("routed_expert_up_proj.weight") @ normed

    def logits(self, token: int) -> Array:
        """Logits after one more token."""
        p = self.w["language_model.model.embed_tokens.weight"][token]
        bank: list[Array] = []
        for index in range(self.c["num_hidden_layers"]):
            start = index % self.c["attn_res_block_size"] == 0
            names = [
                f"{mix}_res_{part}.weight" for mix in ("self_attention", "mlp") for part in ("norm", "proj")
            ]
            a_norm, a_query, f_norm, f_query = (self.layer(index, name) for name in names)
            a_in = self.mix([*bank, p], a_norm, a_query) if bank else p
            if start:
                bank.append(p)
            attention = self.kda if index + 1 in self.k["kda_layers"] else self.mla
            o = attention(index, rms(a_in, self.layer(index, "input_layernorm.weight"), self.eps))
            p = o if start else p + o
            f_in = self.mix([*bank, p], f_norm, f_query)
            f_in = rms(f_in, self.layer(index, "post_attention_layernorm.weight"), self.eps)
            if index < self.c["first_k_dense_replace"]:
                gate, up, down = (self.layer(index, f"mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
                p = p + self.situ(f_in, gate, up, down)
            else:
                p = p + self.moe(index, f_in)
        model = "language_model.model."
        mixed = self.mix(
            [*bank, p],
            self.w[f"{model}output_attn_res_norm.weight"],
            self.w[f"{model}output_attn_res_proj.weight"],
        )
        return self.w["language_model.lm_head.weight"] @ rms(mixed, self.w[f"{model}norm.weight"], self.eps)


A = K3Config.scaled("a")
UNBOUNDED = replace(A, linear_attn=replace(A.linear_attn, gate_lower_bound=None))


@torch.no_grad()
@pytest.mark.parametrize("config", [A, A.mla_twin(), UNBOUNDED], ids=["a", "a-mla", "unbounded"])
def test_the_model_is_the_specification(tmp_path: Path, config: K3Config) -> None:
    save(shaken(config, dtype=torch.float32), tmp_path / "m")
    ids = random_ids(config, 1, 24)
    reference = Reference(tmp_path / "m")
    truth = torch.from_numpy(np.stack([reference.logits(token) for token in ids[0].tolist()]))
    exact = load(tmp_path / "m", torch.float64)
    torch.testing.assert_close(exact(ids)[0][0], truth, rtol=0, atol=1e-10)
    rough = load(tmp_path / "m")
    torch.testing.assert_close(rough(ids)[0][0].double(), truth, rtol=0, atol=5e-4)
