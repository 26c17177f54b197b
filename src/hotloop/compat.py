"""Every internal API of PyTorch that hotloop uses, in one place.

In: nothing. Out: small functions with a stable meaning, whatever the version of torch. Each names the
versions it was written against; a new release of torch is supported by reading this file from top to bottom.
No other module may touch a name of torch that starts with an underscore: tests/test_layers.py enforces it.
Next: dumps.py.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._dynamo.utils import get_debug_dir
from torch._logging import _internal as torch_logging

# The type of an operator overload, `torch.ops.aten.add.Tensor`. torch 2.11 to 2.14.
from torch._ops import OpOverload as OpOverload


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """The logger behind `TORCH_LOGS="<artifact>"` for a module of hotloop, e.g. "hotloop.codegen".

    Level DEBUG when the user asked for the artifact. An artifact that this torch does not know cannot be
    named in TORCH_LOGS (torch itself refuses it): its logger is an ordinary one, silent by default.

    torch 2.11 to 2.14: `torch._logging.getArtifactLogger`, `_internal.log_registry`.
    """
    _attach_to_torch_logs()
    if artifact in torch_logging.log_registry.artifact_names:
        return torch_logging.getArtifactLogger(module, artifact)
    return logging.getLogger(f"{module}.__{artifact}")


def _attach_to_torch_logs() -> None:
    """Let torch's logging own the "hotloop" logger, as it owns "torch".

    Otherwise the records of an enabled artifact would reach no handler. Registered, the logger also follows
    TORCH_LOGS="+hotloop", TORCH_LOGS_OUT, TORCH_LOGS_FORMAT and `torch._logging.set_logs`.

    torch 2.11 to 2.14: `_internal.register_log`, `_internal._setup_handlers`.
    """
    if "hotloop" in torch_logging.log_registry.log_alias_to_log_qnames:
        return
    torch_logging.register_log("hotloop", "hotloop")
    logger = logging.getLogger("hotloop")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    torch_logging._setup_handlers(logging.StreamHandler, logger)
    file = os.environ.get("TORCH_LOGS_OUT")
    if file:
        torch_logging._setup_handlers(lambda: logging.FileHandler(file), logger)


def debug_run_dir() -> str:
    """`torch_compile_debug/run_<time>-pid_<pid>` of this process, which Dynamo's own dumps use as well.

    torch 2.11 to 2.14: `torch._dynamo.utils.get_debug_dir`.
    """
    return get_debug_dir()


def torch_version() -> str:
    """The version of torch that runs, e.g. "2.13.0+cpu": part of cache keys and of dumps."""
    return str(torch.__version__)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has: tensors, views, saved tensors, and its Python object counts as one.

    Whether the Python object counts depends on the version: compare with a count taken when the owners are
    known. torch 2.11 to 2.14: `torch._C._storage_Use_Count`, `UntypedStorage._cdata`.
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def functional_overloads(name: str) -> tuple[torch._ops.OpOverload, ...]:
    """The overloads of `aten::<name>` (or `prims::<name>`) that neither mutate nor take `out=`; () if unknown.

    torch 2.11 to 2.14: `torch._ops.OpOverloadPacket.overloads`, `OpOverload._schema`.
    """
    space, _, short = name.rpartition("::")
    packet = getattr(torch.ops.prims if space == "prims" else torch.ops.aten, short, None)
    if packet is None:
        return ()
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(f for f in found if not f._schema.is_mutable)


@dataclass(frozen=True)
class Argument:
    """One argument of an operator: its name, and the default if it has one.

    `writes` says that the operator mutates it, `aliased` that a result may be a view of it.
    """

    name: str
    default: Any = None
    has_default: bool = False
    writes: bool = False
    aliased: bool = False
    keyword_only: bool = False


@cache
def operator_arguments(target: Any) -> tuple[Argument, ...] | None:
    """The arguments of an operator by its schema; None for what has no schema (higher-order operators).

    torch 2.11 to 2.14: `OpOverload._schema`, `Argument.alias_info`.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return tuple(
        Argument(
            a.name,
            a.default_value if a.has_default_value() else None,
            a.has_default_value(),
            a.alias_info is not None and a.alias_info.is_write,
            a.alias_info is not None and not a.alias_info.is_write,
            a.kwarg_only,
        )
        for a in schema.arguments
    )


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share their memory. Fake tensors have it too.

    torch 2.11 to 2.14: `torch.UntypedStorage._cdata`.
    """
    return int(tensor.untyped_storage()._cdata)
