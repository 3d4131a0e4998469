"""The named configurations: model sizes, schedule, and what a run of each is for."""

from dataclasses import dataclass, replace

from k3eval_local.model.config import K3Config, LinearAttnConfig
from k3eval_local.train.loop import Schedule


@dataclass(frozen=True)
class Preset:
    """Sizes without the vocabulary, which comes from the rank file, and the schedule."""

    width: int
    head_dim: int
    latent: int
    expert: int
    dense: int
    schedule: Schedule
    held_out: int
    """Examples at the head of the data that are kept out of training."""

    def config(self, vocab_size: int) -> K3Config:
        """Five layers in K3's pattern: dense KDA, two more KDA, two MLA; four heads; 8 experts, 2 a token."""
        return K3Config(
            vocab_size=vocab_size,
            hidden_size=self.width,
            num_hidden_layers=5,
            num_attention_heads=4,
            intermediate_size=self.dense,
            q_lora_rank=96,
            kv_lora_rank=self.latent,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=self.head_dim,
            routed_expert_hidden_size=self.latent,
            moe_intermediate_size=self.expert,
            num_experts=8,
            num_experts_per_token=2,
            attn_res_block_size=2,
            linear_attn=LinearAttnConfig(4, self.head_dim, (1, 2, 3), (4, 5)),
        )


PRESETS = {
    "nano": Preset(192, 48, 96, 96, 512, Schedule(steps=2500, hold=1100), held_out=96),
    "micro": Preset(
        96, 32, 64, 32, 192, replace(Schedule(steps=120, hold=80), tokens=2400, drills=20), held_out=32
    ),
}
"""``nano`` is the bundled checkpoint; ``micro`` shows in minutes that the machinery learns."""
