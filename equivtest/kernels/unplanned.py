"""What the backends have in common that compute attention from a batch as it stands, and layers in plain torch."""

from __future__ import annotations

from equivtest.kernels.checks import check_attention_batch
from equivtest.kernels.contract import AttentionBatch, AttentionPlan, AttentionShape, KernelBackend
from equivtest.kernels.torch_layers import TorchLayers


class Unplanned:
    """Part of a `equivtest.kernels.contract.KernelBackend`."""

    @property
    def layers(self) -> TorchLayers:
        return TorchLayers()

    def plan_attention(
        self: KernelBackend,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        for_graph: bool = False,
        reuse: AttentionPlan | None = None,
    ) -> tuple[AttentionBatch, AttentionShape]:
        """The batch, checked once for all layers."""
        check_attention_batch(self, batch, shape)
        return batch, shape
