"""ZeRO: where parameters, gradients and optimizer states lie while training runs (Rajbhandari et al., arXiv:1910.02054).

Users' part is re-exported here. step/ is what happens between a backward and the next forward."""  # noqa: E501

from .init import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    is_zero_param,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]
