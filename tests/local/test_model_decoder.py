from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from model_helpers import TINY, all_experts, random_ids, shaken
from torch import Tensor

from k3eval_local.model import K3Config, K3Model, KDAState, MLAState, ModelState
from k3eval_local.model.state import Segment

A = K3Config.scaled("a")
FORMS = [
    {"form": form, "mla": mla, "attn_res": attn_res}
    for form, mla, attn_res in itertools.product(
        ("recurrent", "chunk"), ("expanded", "absorbed"), ("direct", "two_phase")
    )
]


def same_state(one: ModelState, other: ModelState, bound: float = 1e-10) -> None:
    assert one.lengths == other.lengths
    for left, right in zip(one.layers, other.layers, strict=True):
        if isinstance(left, KDAState) and isinstance(right, KDAState):
            torch.testing.assert_close(left.conv, right.conv, rtol=0, atol=bound)
            torch.testing.assert_close(left.S, right.S, rtol=0, atol=bound)
        else:
            assert isinstance(left, MLAState)
            assert isinstance(right, MLAState)
            torch.testing.assert_close(left.latent, right.latent, rtol=0, atol=bound)


def by_steps(model: K3Model, ids: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    logits = []
    for t in range(ids.shape[1]):
        out, state = model.step(ids[:, t], state)
        logits.append(out)
    return torch.stack(logits, dim=1), state


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 15, 47])
def test_all_forms_are_one_function(length: int) -> None:
    model = shaken(A)
    ids = random_ids(A, 2, length)
    _, start = model(random_ids(A, 2, 19, seed=5), form="recurrent")
    truth, last = model(ids, start, form="recurrent")
    for forms in FORMS[1:]:
        logits, state = model(ids, start, **forms)
        torch.testing.assert_close(logits, truth, rtol=0, atol=1e-10)
        same_state(state, last)
    logits, state = by_steps(model, ids, start)
    torch.testing.assert_close(logits, truth, rtol=0, atol=1e-10)
    same_state(state, last)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_any_split_equals_the_whole(seed: int) -> None:
    model = shaken(A)
    ids = random_ids(A, 2, 61, seed)
    truth, last = model(ids)
    cuts = sorted(torch.randperm(61, generator=torch.Generator().manual_seed(seed))[:4].tolist())
    state, parts = model.empty_state(2), []
    for start, end in itertools.pairwise([0, *cuts, 61]):
        logits, state = model(ids[:, start:end], state, **FORMS[seed])
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), truth, rtol=0, atol=1e-10)
    same_state(state, last)


@torch.no_grad()
@pytest.mark.parametrize("forms", [FORMS[0], FORMS[-1]])
def test_a_batch_of_different_lengths_equals_each_alone(forms: dict[str, str]) -> None:
    model = shaken(A)
    ids = random_ids(A, 4, 40)
    first, second = (33, 1, 16, 40), (5, 40, 0, 17)
    _, state = model(ids, lengths=first, **forms)
    logits, state = model(ids, state, lengths=torch.tensor(second), **forms)
    more, state = by_steps(model, ids[:, :3], state)
    for row, alone in enumerate(state.split()):
        _, single = model(ids[row : row + 1, : first[row]])
        if second[row]:
            expected, single = model(ids[row : row + 1, : second[row]], single)
            torch.testing.assert_close(logits[row : row + 1, : second[row]], expected, rtol=0, atol=1e-10)
        expected, single = by_steps(model, ids[row : row + 1, :3], single)
        torch.testing.assert_close(more[row : row + 1], expected, rtol=0, atol=1e-10)
        same_state(alone, single)


@torch.no_grad()
def test_padding_ids_do_not_matter() -> None:
    model = shaken(A)
    ids = random_ids(A, 2, 30)
    other = ids.clone()
    other[1, 11:] = A.pad_token_id
    one, two = (model(x, lengths=(30, 11)) for x in (ids, other))
    torch.testing.assert_close(one[0][1, :11], two[0][1, :11], rtol=0, atol=1e-12)
    same_state(one[1], two[1], 1e-12)


@torch.no_grad()
def test_fp32_stays_within_5e_4_of_fp64() -> None:
    config = all_experts(A)
    exact, rough = shaken(config), shaken(config, dtype=torch.float32)
    rough.load_state_dict({name: tensor.float() for name, tensor in exact.state_dict().items()})
    exact.load_state_dict({name: tensor.double() for name, tensor in rough.state_dict().items()})
    ids = random_ids(config, 2, 100)
    truth, _ = exact(ids, form="recurrent")
    assert truth.std() > 1
    for forms in (FORMS[0], FORMS[4], FORMS[7]):
        logits, _ = rough(ids, **forms)
        torch.testing.assert_close(logits.double(), truth, rtol=0, atol=5e-4)
    stepped, _ = by_steps(rough, ids, rough.empty_state(2))
    torch.testing.assert_close(stepped.double(), truth, rtol=0, atol=5e-4)


@torch.no_grad()
def test_other_shapes_and_gates() -> None:
    configs = [A.mla_twin(), K3Config.scaled("b"), TINY]
    configs.append(replace(A, linear_attn=replace(A.linear_attn, gate_lower_bound=None)))
    for config in configs:
        model = shaken(config)
        ids = random_ids(config, 2, 21)
        truth, last = model(ids, form="recurrent")
        torch.testing.assert_close(model(ids, **FORMS[-1])[0], truth, rtol=0, atol=1e-10)
        logits, state = by_steps(model, ids, model.empty_state(2))
        torch.testing.assert_close(logits, truth, rtol=0, atol=1e-10)
        same_state(state, last)


@torch.no_grad()
def test_last_only_and_all_logits() -> None:
    model = shaken(A)
    ids = random_ids(A, 2, 37)
    truth, _ = model(ids)
    torch.testing.assert_close(model(ids, last_only=True)[0], truth[:, -1:])
    last, _ = model(ids, lengths=(37, 4), last_only=True)
    torch.testing.assert_close(last[:, 0], torch.stack([truth[0, 36], truth[1, 3]]))
    torch.testing.assert_close(model.all_logits(ids, segment=10), truth, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="at least one real token"):
        model(ids, lengths=(37, 0), last_only=True)


@torch.no_grad()
def test_states_are_values() -> None:
    model = shaken(A)
    ids = random_ids(A, 3, 12)
    _, state = model(ids)
    copy = state.clone()
    once, _ = model.step(ids[:, 0], state)
    twice, _ = model.step(ids[:, 0], state)
    assert torch.equal(once, twice)
    same_state(state, copy, 0)
    same_state(ModelState.stack(state.split()), state, 0)
    assert state.nbytes() == sum(part.nbytes() for part in state.split())
    cut = state.truncate_mla(7)
    assert cut.lengths == (7, 7, 7)
    _, shorter = model(ids[:, :7])
    rewound = ModelState(
        tuple(k if isinstance(k, KDAState) else m for k, m in zip(shorter.layers, cut.layers, strict=True)),
        cut.lengths,
    )
    same_state(model(ids[:, 7:], rewound)[1], state)


@torch.no_grad()
def test_an_empty_segment_changes_nothing() -> None:
    model = shaken(A)
    _, state = model(random_ids(A, 2, 5))
    for forms in FORMS:
        logits, after = model(torch.zeros(2, 0, dtype=torch.int64), state, **forms)
        assert logits.shape == (2, 0, A.vocab_size)
        same_state(after, state, 0)


def test_wrong_calls_say_what_is_wrong() -> None:
    model = shaken(A, dtype=torch.float32)
    state = model.empty_state(2)
    ids = random_ids(A, 2, 4)
    with pytest.raises(ValueError, match="ids hold 3 sequences but the state holds 2"):
        model(random_ids(A, 3, 4), state)
    with pytest.raises(ValueError, match="lengths must be 2 numbers from 0 to 4"):
        model(ids, lengths=(4, 5))
    with pytest.raises(ValueError, match="lengths must be 2 numbers"):
        model(ids, lengths=(4,))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"step takes ids of shape \[B\]"):
        model.step(ids, state)
    with pytest.raises(ValueError, match="another model"):
        model(ids, shaken(A.mla_twin(), dtype=torch.float32).empty_state(2))
    with pytest.raises(ValueError, match="cannot cut"):
        state.truncate_mla(1)
    with pytest.raises(ValueError, match="at least one state"):
        ModelState.stack([])


def test_initial_weights_depend_on_the_seed_alone() -> None:
    one, again, other = (K3Model(A).init_weights(seed) for seed in (3, 3, 4))
    exact = K3Model(A, torch.float64).init_weights(3)
    for left, right, wide in zip(one.parameters(), again.parameters(), exact.parameters(), strict=True):
        assert torch.equal(left, right)
        assert torch.equal(left.double(), wide)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    kda = one.layers[0].self_attn
    steps = torch.nn.functional.softplus(kda.get_parameter("dt_bias")).detach()
    assert not kda.get_parameter("A_log").any()
    assert 0.9e-3 < float(steps.min()) < 3e-3
    assert 0.05 < float(steps.max()) < 0.101
    assert not one.queries().any()


def test_bf16_keeps_fp32_where_k3_does() -> None:
    model = K3Model(A, torch.bfloat16).init_weights(0)
    wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
    kept = {name.removesuffix(".weight").rsplit(".", 1)[1] for name in wide}
    assert kept == {"q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm"}
    assert model.layers[1].block_sparse_moe.gate.e_score_correction_bias.dtype == torch.float32
    with torch.no_grad():
        logits, state = model(random_ids(A, 2, 20))
        logits, state = model.step(random_ids(A, 2, 1)[:, 0], state)
    assert logits.dtype == torch.bfloat16
    assert isinstance(state.layers[0], KDAState)
    assert state.layers[0].S.dtype == torch.float32
    assert torch.isfinite(logits).all()


def test_the_full_model_fits_on_the_meta_device() -> None:
    model = K3Model(K3Config.full(), torch.bfloat16, device="meta")
    assert len(model.layers) == 93
    assert model.model.embed_tokens.weight.is_meta
    assert model.layers[3].self_attn.get_parameter("kv_b_proj.weight").shape == (96 * 256, 512)


@pytest.mark.parametrize("forms", [FORMS[0], FORMS[-1]])
def test_gradients_reach_every_parameter(forms: dict[str, str]) -> None:
    model = shaken(A, dtype=torch.float32)
    logits, _ = model(random_ids(A, 4, 33), lengths=(33, 20, 7, 1), **forms)
    torch.nn.functional.cross_entropy(logits[0], random_ids(A, 1, 33, 1)[0]).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []
    unused = {name for name, p in model.named_parameters() if not p.grad.any()}  # type: ignore[union-attr]
    assert unused <= {
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.self_attention_res_proj.weight",
    }


@torch.no_grad()
@pytest.mark.parametrize("past", [(3, 3), (3, 1)], ids=["even", "ragged"])
def test_attention_layers_stay_on_their_device(past: tuple[int, int]) -> None:
    """The meta device refuses to mix with tensors of the CPU, as a GPU would."""
    model = K3Model(A, device="meta")
    x = torch.zeros(2, 5, A.hidden_size, device="meta")
    state = ModelState.empty(A, 2, torch.float32, "meta")
    mla_state = MLAState(torch.zeros(2, 3, A.latent_cache_width, device="meta"))
    for segment in (Segment(past, (5, 5), 5), Segment(past, (5, 2), 5)):
        for layer, before in zip(model.layers, state.layers, strict=True):
            for kda, mla in (("chunk", "expanded"), ("recurrent", "absorbed")):
                before = before if isinstance(before, KDAState) else mla_state
                y, _ = layer.attention(x, before, segment, kda, mla)  # type: ignore[arg-type]
                assert y.is_meta
                assert y.shape == x.shape


def test_autocast_leaves_the_state_in_fp32() -> None:
    model = shaken(A, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(random_ids(A, 2, 33), lengths=(33, 9), attn_res="two_phase")
    assert isinstance(state.layers[0], KDAState)
    assert state.layers[0].S.dtype == torch.float32
    logits[0].float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_one_whole_model_gradcheck() -> None:
    model = shaken(TINY)
    ids = random_ids(TINY, 2, 3)
    weights = [model.layers[0].self_attn.get_parameter("A_log"), model.model.output_attn_res_proj.weight]
    weights += [model.layers[2].self_attn.get_parameter("kv_b_proj.weight")]
    names = [name for name, p in model.named_parameters() if any(p is w for w in weights)]

    def run(*values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        logits: Tensor = torch.func.functional_call(model, parameters, (ids,))[0][..., :3]
        return logits

    leaves = [model.get_parameter(name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, leaves)
