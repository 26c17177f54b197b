"""hotloop: a compiler back end for PyTorch.

`torch.compile(model, backend="hotloop")` finds it through its entry point, so a program needs this module
only for the configuration and for the kinds of error. It imports nothing heavy: neither torch nor any stage
of the compiler. Read next: backend.py, which holds the list of stages.
"""

from hotloop.config import Config, config
from hotloop.errors import (
    CompileError,
    HotloopError,
    MissingCompilerError,
    OptionError,
    ToolchainError,
    VerifyError,
)

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "Config",
    "HotloopError",
    "MissingCompilerError",
    "OptionError",
    "ToolchainError",
    "VerifyError",
    "__version__",
    "config",
]
