"""The vision tower of a model of text and images: what it makes of the images of a microbatch, put in the place of the
tokens that show them.

The language model beneath it is packed as any other. The tower is packed, too: the patches of all images lie one after
another, each image attends to itself, and each distinct image goes through it once, however many sequences show it. A
microbatch without images sends a smallest one through, of which no token takes anything: ranks that share parameters
gather them together, and gradients of such a microbatch are zeros. Where no prompt of a run shows images the tower is
not called. Known are the families of `FAMILIES` (rolecall/data/images/tokens.py).

Not how files become patches, nor where images stand (packing/images.py).

Shapes: N tokens that are computed; P patches of all images; C numbers of a patch; V features of all images, one for
each token that shows one; M such tokens; H hidden size; I images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from rolecall.training.model.attention.packed import PackedPlan, TracedAttention, attend_packed, plan_attention

NAME = "rolecall_flash_patches"
"""Pass as the tower's attn_implementation. By `flash` in it transformers hands all images to one call."""


@dataclass(frozen=True)
class ShownImages:
    """The distinct images of a microbatch, and the tokens that show them."""

    patches_PC: Sequence[torch.Tensor]
    """The patches of each image, on the host, where other microbatches may show the same; joined when they are
    computed.
    """
    grids_I3: torch.Tensor
    """int64, on the host: each image's frames (1), rows and columns of patches."""
    token_M: torch.Tensor
    """int64, growing, on the engine's device: the tokens that show a feature, among those that are computed (distinct
    ones where sequences share beginnings).
    """
    feature_M: torch.Tensor
    """int64, on the engine's device: which in [V] each of them shows."""


class VisionTower:
    """The tower of one model, and the way of its features into the language model. It holds no parameters of its own:
    they are the model's.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf
        config = hf.config.vision_config
        self._is_windowed = hf.config.model_type == "qwen2_5_vl"
        self._interpolates = hasattr(self.module, "num_grid_per_side")
        width: int = config.embed_dim if hf.config.model_type == "qwen2_vl" else config.hidden_size
        self._head_size = width // config.num_heads
        self._patch_size: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.merge: int = config.spatial_merge_size
        """Rows, and columns, of patches that make one feature."""
        self.is_called = True
        """Whether a microbatch may show images, here or on another rank."""
        self.module.config._attn_implementation = NAME
        self._is_deep = hasattr(self.backbone, "_deepstack_process")
        if self._is_deep:
            self.backbone._deepstack_process = _added  # type: ignore[assignment]  # a method, of this one module

    @property
    def module(self) -> PreTrainedModel:
        """The tower itself."""
        module = self._hf.base_model.visual
        assert isinstance(module, PreTrainedModel)
        return module

    @property
    def backbone(self) -> nn.Module:
        """The language model without its output layer."""
        backbone: nn.Module = self._hf.base_model.language_model
        return backbone

    def inputs(
        self, token_ids_N: torch.Tensor, position_ids_N: torch.Tensor, shown: ShownImages | None
    ) -> dict[str, Any]:
        """Returns what `backbone` is called with: embeddings with the features in their places, and positions, [N] or
        [3, N]. `shown` absent: no token shows an image.
        """
        if not self.is_called:
            return self.inputs_of_text(token_ids_N, position_ids_N)
        embeds_NH = self._hf.get_input_embeddings()(token_ids_N)
        if shown is None:
            shown = self._nothing(token_ids_N.device)
        features_VH, *deeper = self._features(shown, embeds_NH.dtype)
        token_M = shown.token_M
        embeds_NH = embeds_NH.index_copy(0, token_M, _picked(features_VH, shown.feature_M).to(embeds_NH.dtype))
        inputs = {"inputs_embeds": embeds_NH[None], "position_ids": _three(position_ids_N)}
        if deeper:
            inputs["visual_pos_masks"] = token_M  # `_added` takes these
            inputs["deepstack_visual_embeds"] = [_picked(each_VH, shown.feature_M) for each_VH in deeper]
        return inputs

    def inputs_of_text(self, token_ids_N: torch.Tensor, position_ids_N: torch.Tensor) -> dict[str, Any]:
        """Returns what `backbone` is called with where the tower is left out."""
        return {
            "inputs_embeds": self._hf.get_input_embeddings()(token_ids_N)[None],
            "position_ids": _three(position_ids_N),
        }

    def trace(self, rows: int, columns: int, trace: TracedAttention) -> torch.Tensor:
        """All features of an image of so many patches on the meta device, one after another. The tower's layers tell
        `trace` what they ask of attention.
        """
        grids_I3 = torch.tensor([[1, rows, columns]])
        patches_PC = torch.zeros(rows * columns, self._patch_size, device="meta", dtype=self.module.dtype)
        given = self._given(grids_I3, torch.device("meta"))
        return torch.cat(self._made(self.module(patches_PC, patches=trace, **given)))

    def sees_windows(self, layer: int) -> bool:
        """Whether the tower's layer of this number attends within windows."""
        return self._is_windowed and layer not in self._hf.config.vision_config.fullatt_block_indexes

    def patches(self, grids_I3: torch.Tensor) -> tuple[list[int], list[int]]:
        """Patches of each image, and of each window that layers attend within, of which there may be none."""
        images: list[int] = grids_I3.prod(1).tolist()
        if not self._is_windowed:
            return images, []
        return images, get_vision_window_index(grids_I3, *self._window_sizes())[1].diff().tolist()

    def _features(self, shown: ShownImages, dtype: torch.dtype) -> list[torch.Tensor]:
        """The features of the images that are shown, as `_made` has them."""
        device = shown.token_M.device
        given = self._given(shown.grids_I3, device)
        plan = partial(plan_attention, dtype=dtype, head_size=self._head_size, causal=False)
        images, windows = self.patches(shown.grids_I3)
        plans = [plan(images, given["cu_seqlens"])]
        if windows:
            plans.append(plan(windows, given["cu_window_seqlens"]))
        patches_PC = torch.cat(list(shown.patches_PC)).to(device, dtype, non_blocking=True)
        return self._made(self.module(patches_PC, patches=plans, **given))

    def _made(self, output: Any) -> list[torch.Tensor]:
        """[V, H] each: the features that stand in the place of tokens' embeddings, then those that are added to the
        hidden states of the language model's first layers, a layer each.
        """
        return [output.pooler_output, *(output.deepstack_features if self._is_deep else [])]

    def _given(self, grids_I3: torch.Tensor, device: torch.device) -> dict[str, Any]:
        """Computes on the host what the tower would of `grids_I3` on the device, and wait for."""
        bounds = get_vision_cu_seqlens(grids_I3)
        given: dict[str, Any] = {
            "grid_thw": grids_I3,  # all but GLM's leave it unread
            "position_ids": get_vision_position_ids(grids_I3, self.merge),
            "cu_seqlens": bounds,
        }
        if self._is_windowed:
            index, windows = get_vision_window_index(grids_I3, *self._window_sizes())
            given |= {"window_index": index, "cu_window_seqlens": windows}
        elif self._interpolates:
            tower = self.module
            taps, weights = get_vision_interpolation_indices_and_weights(
                grids_I3,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=self.merge,
            )
            given |= {"interp_indices": taps, "interp_weights": weights}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in given.items()}
        longest = {"max_seqlen": int(bounds.diff().max())}
        if self._is_windowed:
            longest["max_window_seqlen"] = int(windows.diff().max())
        return moved | longest

    def _window_sizes(self) -> tuple[int, int, int]:
        config = self._hf.config.vision_config
        return self.merge, config.window_size, config.patch_size

    def _nothing(self, device: torch.device) -> ShownImages:
        """The smallest image there is, which no token shows."""
        none_M = torch.zeros(0, dtype=torch.int64, device=device)
        patches_PC = torch.zeros(self.merge**2, self._patch_size)
        return ShownImages([patches_PC], torch.tensor([[1, self.merge, self.merge]]), none_M, none_M)


def patch_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    patches: Sequence[PackedPlan] | TracedAttention,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query, key and value [1, heads, P, D] -> ([1, P, heads, D], None). Each image,
    or window of one, attends to itself.
    """
    if isinstance(patches, TracedAttention):
        return patches.attend(query, key, value, None), None
    # the very bounds that the tower was given: others would attend across images, or windows, in silence
    (plan,) = [plan for plan in patches if plan.cu_seqlens is cu_seq_lens_q]
    query_PHD, key_PHD, value_PHD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend_packed(query_PHD, key_PHD, value_PHD, plan, scaling)[None], None


def _added(hidden_1NH: torch.Tensor, token_M: torch.Tensor, features_MH: torch.Tensor) -> torch.Tensor:
    """The hidden states of a layer with the features of tokens that show them. In place of transformers' own, which is
    given a mask, and waits for the device to count it.
    """
    return hidden_1NH.index_add(1, token_M, features_MH.to(hidden_1NH.dtype)[None])


def _three(position_ids_N: torch.Tensor) -> torch.Tensor:
    """[3, 1, N] from [N] or [3, N]."""
    return position_ids_N.expand(3, -1)[:, None]


def _picked(features_VH: torch.Tensor, feature_M: torch.Tensor) -> torch.Tensor:
    """[M, H]; gradients of a feature that several tokens show are summed in float32 at least."""
    wide = torch.promote_types(features_VH.dtype, torch.float32)
    return features_VH.to(wide).index_select(0, feature_M)


AttentionInterface.register(NAME, torch.compiler.disable(patch_attention))  # type: ignore[no-untyped-call]
