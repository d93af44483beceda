"""``[drafter]``."""

from typing import Annotated

from pydantic import Field, model_validator

from dflash_offline.config.section import Section

Heads = Annotated[int, Field(gt=0, le=4096)]


class DrafterConfig(Section):
    """The drafter's shape. Sizes left out follow the target."""

    layers: Annotated[int, Field(gt=0, le=256)] = Field(5, description="Number of decoder layers.")
    block_size: Annotated[int, Field(ge=2, le=64)] = Field(
        16, description="Slots of a block: one known token and block_size - 1 drafted ones."
    )
    target_layer_ids: list[int] | None = Field(
        None, description="Captured layers the drafter reads, in this order; all captured ones when left out."
    )
    mask_token_id: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Token id of a masked slot. Left out: the tokenizer's mask token, else the first embedding row that no token uses.",
    )
    intermediate_size: Annotated[int, Field(gt=0, le=1_000_000)] | None = Field(None, description="Width of the MLP.")
    num_attention_heads: Heads | None = Field(None, description="Query heads.")
    num_key_value_heads: Heads | None = Field(None, description="Key and value heads.")
    head_dim: Annotated[int, Field(gt=0, le=4096)] | None = Field(None, description="Width of one head; even.")
    sliding_window: Annotated[int, Field(gt=0, lt=2**31)] | None = Field(
        None, description="Window in tokens of the sliding layers; none when left out."
    )
    sliding_layers: list[int] | None = Field(
        None, description="Which drafter layers slide; all when sliding_window is set and this is left out."
    )
    init_from: str | None = Field(
        None,
        description="Exported drafter (z-lab or speculators form, ours or another's; folder, or name in the hub cache) whose weights "
        "training starts from; random ones when left out.",
    )

    @model_validator(mode="after")
    def _sizes(self) -> "DrafterConfig":
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embedding needs an even one")
        if self.num_attention_heads and self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is no multiple of num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.sliding_layers is not None:
            if self.sliding_window is None:
                raise ValueError("sliding_layers is set but sliding_window is not")
            if any(layer not in range(self.layers) for layer in self.sliding_layers):
                raise ValueError(f"sliding_layers = {self.sliding_layers} names a layer the drafter does not have (layers = {self.layers})")
        if self.target_layer_ids is not None and (
            not self.target_layer_ids or len(set(self.target_layer_ids)) != len(self.target_layer_ids)
        ):
            raise ValueError(f"target_layer_ids = {self.target_layer_ids}: at least one, each once")
        return self
