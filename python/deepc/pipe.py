"""deepc.pipe: models as lists of layers for pipeline parallelism, under DeepSpeed's names."""

from .parallel.pipeline.layers import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
