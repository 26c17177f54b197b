"""Every option of hotloop: one frozen dataclass, and the namespace that users set as `hotloop.config`.

In: what the user set, in four places, the later one winning: the default, the environment, `hotloop.config`
(assignment or `patch`), and the mode and options of one `torch.compile` call. Out: `resolve(mode, options)`
gives the frozen `Config` that a whole compile works from, so that no stage sees an option change under it.

An option is declared once, as a field of `Config`, `Cpp` or `Trace`; its type, its choices, its environment
variables and its place in `Config.code_key()` all follow from that declaration. Options of a nested class
have dotted names: "cpp.simd". The environment variable of an option is HOTLOOP_ and its name in capitals
(HOTLOOP_CPP_SIMD), besides the names that users of PyTorch already know. Next: dumps.py.

The package's attribute `hotloop.config` is the object `config` below, not this module, whose other names
come by `from hotloop.config import Config, resolve`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hotloop.errors import OptionError, unknown_name


def _option(
    default: Any,
    doc: str,
    *,
    code: bool,
    env: tuple[str, ...] = (),
    minimum: int | None = None,
    items: tuple[str, ...] = (),
    used: bool = True,
) -> Any:
    """One option: its default, its documentation, and whether it changes the code that is generated.

    `env` adds environment variables to the one that the name implies; `items` are what a tuple may hold.
    `used=False`: the option is understood and checked, but no stage asks for it yet.
    A callable default is called for each new `Config`.
    """
    metadata = {"doc": doc, "code": code, "env": env, "minimum": minimum, "items": items, "used": used}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _user_cache_dir() -> str:
    """The folder that the platform keeps for a user's caches, and `hotloop` in it."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        parent = Path(local) if local else Path(os.path.expanduser("~/AppData/Local"))
    elif sys.platform == "darwin":
        parent = Path(os.path.expanduser("~/Library/Caches"))
    else:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification says that a relative path there is invalid and to be ignored.
        parent = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~/.cache"))
    if not parent.is_absolute():
        # A user without a home, as in some containers.
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return str(Path(tempfile.gettempdir()) / f"hotloop-{user}")
    return str(parent / "hotloop")


CACHE_LIMIT = 2 << 30

GEMM_BACKENDS = ("ATEN", "CPP", "TRITON", "CUTLASS")


@dataclass(frozen=True)
class Cpp:
    """Options of the C++ code for the CPU."""

    simd: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "scalar"] = _option(
        "auto", "Vector instructions to generate for; auto asks the CPU.", code=True
    )
    cxx: str | None = _option(
        None, "The C++ compiler's command; None looks for one.", code=True, env=("CXX",)
    )
    threads: int = _option(
        0, "Threads a kernel is planned for; 0 takes torch.get_num_threads().", code=True, minimum=0
    )
    enable_kernel_profile: bool = _option(
        False,
        "Give each kernel its own row in torch.profiler, named graph_<n>_<kernel>.",
        code=False,
    )


@dataclass(frozen=True)
class Trace:
    """Options that only report."""

    log_autotuning_results: bool = _option(
        False,
        "Append every timing that autotuning takes to autotuning_results.jsonl, in the folder of the dumps.",
        code=False,
    )


@dataclass(frozen=True)
class Config:
    """The options of one compile, fixed from its first stage to its last."""

    precision: Literal["default", "eager"] = _option(
        "default",
        "default keeps low-precision intermediates in float32 inside a kernel; eager rounds after every "
        "operator, as eager PyTorch does.",
        code=True,
    )
    freezing: bool = _option(
        False,
        "In inference, compute once what depends on weights alone, and fold what follows a convolution "
        "(batch norm) into it; both again after an update of a weight.",
        code=True,
        env=("TORCHINDUCTOR_FREEZING",),
    )
    fallback_random: bool = _option(
        False,
        "Draw random numbers through PyTorch, bit-equal to eager's, instead of in the kernel.",
        code=True,
    )
    on_error: Literal["raise", "eager"] = _option(
        "raise", "What a failed compile does: raise, or warn once and run the graph uncompiled.", code=False
    )
    missing_toolchain: Literal["raise", "eager"] = _option(
        "raise", "What a missing C++ compiler does: raise, or warn once and run uncompiled.", code=False
    )
    check: bool = _option(False, "Run the IR's verifier after every stage.", code=False)
    cache_dir: str = _option(_user_cache_dir, "Where everything compiled is kept.", code=False)
    cache_limit: int = _option(
        CACHE_LIMIT,
        "Bytes that cache_dir may hold: above it, what was not used for longest is removed.",
        code=False,
        minimum=0,
    )
    cpp_wrapper: bool | None = _option(
        None,
        "The host program: True for C++, False for Python, None for the one measured best.",
        code=True,
        used=False,
    )
    memory_pool: bool = _option(
        True, "Reuse the memory of intermediates, and of outputs that nobody holds any more.", code=True
    )
    memory_pool_threshold: int = _option(
        1 << 20, "Bytes below which a buffer is left to PyTorch's allocator.", code=False, minimum=0
    )
    memory_pool_limit: int = _option(
        1 << 30, "Bytes that all pools of a process may keep between calls.", code=False, minimum=0
    )
    unfused: bool = _option(
        False, 'One kernel per operator, for finding a fault; what backend="hotloop_unfused" sets.', code=True
    )
    parallel_threshold: int = _option(
        1 << 18,
        "Bytes of work (read and written) below which a kernel runs on one thread.",
        code=True,
        minimum=0,
    )
    compile_workers: int = _option(
        0, "Compilers run side by side; 0 takes as many as there are cores.", code=False, minimum=0
    )
    debug: bool = _option(
        False, "Leave the dumps of every stage in a folder.", code=False, env=("TORCH_COMPILE_DEBUG",)
    )
    debug_dir: str | None = _option(
        None,
        "The folder for dumps; None takes torch_compile_debug/run_<time>-pid_<pid>, beside Dynamo's.",
        code=False,
    )
    override_dir: str | None = _option(
        None,
        "A folder of edited sources that replace the generated ones of the same name.",
        code=False,
        env=("HOTLOOP_OVERRIDE",),
    )
    cudagraphs: bool = _option(
        False,
        'Record CUDA graphs; what mode="reduce-overhead" sets. No effect on the CPU.',
        code=True,
        used=False,
    )
    max_autotune: bool = _option(
        False,
        "Measure the candidates of each matrix product by a weight that lasts, and keep the fastest.",
        code=True,
    )
    max_autotune_gemm_backends: tuple[str, ...] = _option(
        GEMM_BACKENDS,
        "Candidates for matrix products; a comma-separated text is accepted too.",
        code=True,
        env=("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS",),
        items=GEMM_BACKENDS,
    )
    weight_packing: Literal["auto", "off", "replace"] = _option(
        "auto",
        "Reorder weights of products and convolutions: auto keeps a packed copy and repacks after an update; "
        "off leaves them as they are; replace, with freezing, also gives the memory of plain weights back: "
        "their pages move to files in cache_dir.",
        code=True,
    )
    cpp: Cpp = dataclasses.field(default_factory=Cpp)
    trace: Trace = dataclasses.field(default_factory=Trace)

    def replace(self, options: Mapping[str, object]) -> Config:
        """This configuration with some options changed, by dotted name.

        Raises `OptionError` for an unknown name or a value that the option cannot take.
        """
        values = {name: _check(find_option(name), value) for name, value in options.items()}
        changes: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
        for section in ("cpp", "trace"):
            inner = {
                name.partition(".")[2]: value
                for name, value in values.items()
                if name.startswith(section + ".")
            }
            if inner:
                changes[section] = dataclasses.replace(getattr(self, section), **inner)
        return dataclasses.replace(self, **changes) if changes else self

    def get(self, name: str) -> Any:
        """The value of an option by its dotted name."""
        section, _, inner = find_option(name).name.rpartition(".")
        return getattr(getattr(self, section) if section else self, inner)

    def changed(self) -> dict[str, Any]:
        """The options that change generated code and differ from the defaults, by dotted name."""
        default = Config()
        found = {name: self.get(name) for name, option in options().items() if option.code}
        return {name: value for name, value in found.items() if value != default.get(name)}

    def code_options(self) -> dict[str, str]:
        """The options that change generated code, as texts by dotted name: part of every cache key."""
        return {name: repr(self.get(name)) for name, option in options().items() if option.code}

    def code_key(self) -> str:
        """The same in one text, `name=value` a line."""
        return "\n".join(f"{name}={value}" for name, value in self.code_options().items())


@dataclass(frozen=True)
class Option:
    """What is known of one option beside its value.

    Attributes:
        name: dotted name, "cpp.simd".
        type: the field's type: bool, int, str, one of these or None, a Literal, or a tuple of str.
        doc: what it does.
        code: whether it changes the code that is generated.
        env: the environment variables that set it, the strongest first.
        minimum: the least value of a number.
        items: what a tuple may hold.
        used: whether any stage asks for it yet.
    """

    name: str
    type: Any
    doc: str
    code: bool
    env: tuple[str, ...]
    minimum: int | None
    items: tuple[str, ...]
    used: bool


@cache
def options() -> Mapping[str, Option]:
    """Every option by its dotted name, in order of declaration."""
    found = {}
    for prefix, section in (("", Config), ("cpp.", Cpp), ("trace.", Trace)):
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            if not field.metadata:  # a nested class
                continue
            name = prefix + field.name
            own = "HOTLOOP_" + name.replace(".", "_").upper()
            found[name] = Option(
                name,
                hints[field.name],
                field.metadata["doc"],
                field.metadata["code"],
                (own, *field.metadata["env"]),
                field.metadata["minimum"],
                field.metadata["items"],
                field.metadata["used"],
            )
    return types.MappingProxyType(found)


def find_option(name: str) -> Option:
    """The option of that dotted name; an `OptionError` names the nearest one otherwise."""
    if not isinstance(name, str):
        raise OptionError(f"an option is named by a text, not {name!r}; valid: {', '.join(options())}")
    option = options().get(name)
    if option is None:
        inside = [known for known in options() if known.startswith(f"{name}.")]
        if inside:
            raise OptionError(
                f"'{name}' is a group of options: name each with a dot, options={{\"{inside[0]}\": ...}}; "
                f"valid: {', '.join(inside)}"
            )
        raise unknown_name("option", name, options())
    return option


def _check(option: Option, value: object, given_by: str = "") -> object:
    """`value` in the option's own type, or an `OptionError` that says what the option takes."""
    takes = typing.get_args(option.type)
    origin = typing.get_origin(option.type)
    if origin is Literal:
        if value in takes:
            return value
    elif origin is tuple:
        listed = _as_tuple(value)
        if listed and all(item in option.items for item in listed):
            return listed
    else:
        # bool is an int in Python, but True threads or a limit of False bytes is a mistake.
        accepted = takes or (option.type,)
        if type(value) in accepted and not (type(value) is int and _below(value, option.minimum)):
            return value
        if str in accepted and isinstance(value, os.PathLike):
            return os.fspath(value)
    source = f" (set by {given_by})" if given_by else ""
    raise OptionError(f"option '{option.name}' takes {_describe(option)}, not {value!r}{source}")


def _below(value: object, minimum: int | None) -> bool:
    return minimum is not None and isinstance(value, int) and value < minimum


def _as_tuple(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(item.strip().upper() for item in value.split(",") if item.strip())
    if isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
        return tuple(item.upper() for item in value)
    return ()


def _describe(option: Option) -> str:
    """What an option takes, in words."""
    takes = typing.get_args(option.type)
    if typing.get_origin(option.type) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in takes)
    if option.items:
        return "one or more of " + ", ".join(option.items)
    words = {bool: "True or False", int: "an integer", str: "a text", types.NoneType: "None"}
    text = " or ".join(words[kind] for kind in takes or (option.type,))
    return text if option.minimum is None else f"{text} of at least {option.minimum}"


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _from_environment(option: Option) -> tuple[str, object] | None:
    """The environment variable that sets an option, with the value; an empty variable counts as not set."""
    for variable in option.env:
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        value: object = text
        accepted = typing.get_args(option.type) or (option.type,)
        if bool in accepted and text.lower() in _TRUE + _FALSE:
            value = text.lower() in _TRUE
        elif int in accepted and text.lstrip("+-").isdecimal():
            value = int(text)
        elif types.NoneType in accepted and text.lower() == "none":
            value = None
        return variable, _check(option, value, variable)
    return None


class Namespace:
    """The options whose names start with one prefix, as attributes that can be read and set."""

    def __init__(self, settings: Settings, prefix: str) -> None:
        object.__setattr__(self, "_settings", settings)
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy, pickle and IPython ask every object for
            raise AttributeError(name)
        full = self._prefix + name
        if full in ("cpp", "trace"):
            return Namespace(self._settings, full + ".")
        try:
            return self._settings.get(full)
        except OptionError as error:
            if full in options():  # the environment holds a bad value
                raise
            raise AttributeError(str(error)) from None

    def __setattr__(self, name: str, value: object) -> None:
        self._settings.set(self._prefix + name, value)

    def __dir__(self) -> list[str]:
        inner = [name[len(self._prefix) :] for name in options() if name.startswith(self._prefix)]
        return sorted({*object.__dir__(self), *(name.partition(".")[0] for name in inner)})

    def __repr__(self) -> str:
        names = [name for name in options() if name.startswith(self._prefix)]
        return "\n".join(f"hotloop.config.{name} = {self._settings.get(name)!r}" for name in names)


_NOTHING: Mapping[str, object] = types.MappingProxyType({})


class Settings(Namespace):
    """What `hotloop.config` is: the options a user set in this process.

    Reading an attribute gives the value in force, setting one changes it for later compiles. The environment
    is read anew each time. `patch` changes options for a block, and in the thread that runs the block only.
    """

    def __init__(self) -> None:
        super().__init__(self, "")
        # Options set by assignment, and those of the patches that surround the running code.
        object.__setattr__(self, "_assigned", {})
        object.__setattr__(self, "_patched", ContextVar[Mapping[str, object]]("patched", default=_NOTHING))

    def get(self, name: str) -> Any:
        """The value in force of an option, by its dotted name."""
        option = find_option(name)
        for layer in (self._patched.get(), self._assigned):
            if name in layer:
                return layer[name]
        found = _from_environment(option)
        return found[1] if found else Config().get(name)

    def set(self, name: str, value: object) -> None:
        """Set an option by its dotted name. Inside a `patch` of that option, until the end of the patch."""
        checked = _check(find_option(name), value)
        if name in self._patched.get():
            self._patched.set({**self._patched.get(), name: checked})
        else:
            self._assigned[name] = checked

    def reset(self) -> None:
        """Forget every assignment: the environment and the defaults hold again."""
        self._assigned.clear()

    @contextmanager
    def patch(self, options: Mapping[str, object] | None = None, /, **named: object) -> Iterator[Settings]:
        """Change options for a block: `patch(check=True)`, `patch({"cpp.threads": 1})`; or a decorator."""
        values = {**(options or {}), **named}
        checked = {name: _check(find_option(name), value) for name, value in values.items()}
        token = self._patched.set({**self._patched.get(), **checked})
        try:
            yield self
        finally:
            self._patched.reset(token)

    def snapshot(self) -> Config:
        """The options in force now, frozen."""
        values = {}
        for name, option in options().items():
            found = _from_environment(option)
            if found:
                values[name] = found[1]
        return Config().replace({**values, **self._assigned, **self._patched.get()})

    def describe(self) -> str:
        """Every option with its value, its environment variables and what it does, for a person to read."""
        return "\n".join(
            f"{name} = {self.get(name)!r}{'' if option.used else ' (no effect yet)'}\n    {option.doc}\n"
            f"    takes {_describe(option)}; environment: {', '.join(option.env)}"
            for name, option in options().items()
        )


# The one piece of state that outlives a compile: it belongs to the user, and no stage reads it.
config = Settings()

MODES: Mapping[str, Mapping[str, object]] = types.MappingProxyType(
    {
        "default": {},
        "reduce-overhead": {"cudagraphs": True},
        "max-autotune": {"max_autotune": True, "cudagraphs": True},
        "max-autotune-no-cudagraphs": {"max_autotune": True},
    }
)


@cache
def _warn_of_unknown_variables() -> None:
    """Variables named HOTLOOP_ that no option has: a warning, since another program may mean something by
    them."""
    known = {v for option in options().values() for v in option.env if v.startswith("HOTLOOP_")}
    for variable in sorted(os.environ):
        if variable.startswith("HOTLOOP_") and variable not in known:
            error = unknown_name("environment variable", variable, known, prefix="HOTLOOP_")
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def resolve(
    mode: str | None = None, options: Mapping[str, object] | None = None, own: Mapping[str, object] = _NOTHING
) -> Config:
    """The configuration of one compile: `hotloop.config` as it is now, then the mode, the options, `own`.

    Raises `OptionError` for an unknown mode or option, naming the nearest valid one, and for a wrong value.
    """
    if mode is not None and mode not in tuple(MODES):  # a list cannot be looked up
        raise unknown_name("mode", str(mode), MODES)
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f'options are a dict such as {{"max_autotune": True}}, not {options!r}')
    _warn_of_unknown_variables()
    return config.snapshot().replace({**MODES[mode or "default"], **(options or {}), **own})
