"""Which C++ compiler builds the kernels, for which CPU, with which flags.

In: the environment ($CXX, PATH, an installed Visual Studio, the PyPI package ziglang) and what the operating
system tells of the CPU. Out: a frozen `Toolchain` and a SIMD level. What holds: nothing is run to find out,
except Microsoft's own vswhere on Windows: no test compile, no `--version`. Two toolchains of equal
`identity` and equal flags print the same machine code. Next: cache.py.

Threads. There must be one OpenMP runtime in the process, the one that torch brought. GCC's kernels are
compiled with -fopenmp but linked without its libgomp: the GOMP_* functions stay undefined and the loader
binds them to the libgomp that libtorch_cpu itself needs, so torch.set_num_threads governs the kernels too.
(A thread that has called no torch operator yet still has OpenMP's default count; torch.get_num_threads(),
called once per thread, sets it.) Clang and zig call libomp's __kmpc_*, which that libgomp lacks, so for them
`openmp` is False, and the code generator prints the same loop through libtorch_cpu's exported C function

    extern "C" int torch_parallel_for(
        long long begin, long long end, long long grain,
        void (*body)(long long begin, long long end, void *context), void *context);

(torch 2.10 and later). It runs `body` over parts of [begin, end), at least `grain` long, and returns 0;
nested in another parallel region it runs serially.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from hotloop.errors import MissingCompilerError, OptionError

Kind = Literal["gcc", "clang", "cl", "zig"]
SimdLevel = Literal["avx512", "avx2", "scalar", "neon", "avx512_bf16", "amx"]

SIMD_LEVELS: tuple[SimdLevel, ...] = ("avx512", "avx2", "scalar", "neon", "avx512_bf16", "amx")

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c")

# What each level may use; a CPU has the level when /proc/cpuinfo lists them all. avx512_bf16 is avx512 with
# products of bfloat16 by vdpbf16ps, and amx has its tiles for them besides.
_CPU_FLAGS: dict[SimdLevel, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
}

# No -mtune=native: the same key must give the same machine code on every machine that shares a cache.
# What avx512_bf16 and amx have beyond avx512 is written as assembly.
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c")
_SIMD_FLAGS: dict[SimdLevel, tuple[str, ...]] = {
    "amx": _AVX512_FLAGS,
    "avx512_bf16": _AVX512_FLAGS,
    "avx512": _AVX512_FLAGS,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "scalar": (),
    "neon": (),  # part of every aarch64
}

# Measured on a file of two small kernels, g++ 12.2, two cores of Zen 3, medians of 7, interleaved:
#
#     -O3 159 ms, -O2 147, -O2 -ftree-vectorize 148, -O1 116 (its loops are not vectorised);
#     of -O3, in another run: with the standard libraries 110 ms, -nostdlib 87 (an empty file: 39 and 22);
#     -pipe, -fuse-ld=gold, -fno-asynchronous-unwind-tables, --build-id=none: within the noise;
#     -fopenmp costs 14 ms over the serial loop (the outlined function);
#     linked against the real libtorch_cpu 253 ms, against an empty library of the same SONAME 90;
#     any include costs more than all of these together (<immintrin.h> 300 ms, <cmath> 100 ms).
#
# None of the flags changes a value. -ffp-contract=off: a product and a sum contracted behind our back round
# once where eager rounds twice; where one rounding is wanted the source says __builtin_fma. -fwrapv:
# integers wrap. -fno-trapping-math lets a select be evaluated on both sides; only the status flags, which
# nobody reads, differ. -fno-strict-aliasing: an arena holds a float buffer where an int buffer was.
_VALUE_FLAGS = (
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
)
_CODE_FLAGS = ("-O3", "-fno-exceptions", "-fno-rtti", "-Wno-psabi")


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler and how to call it.

    Arguments:
        compiler: the command, ready to have flags appended.
        kind: the family, which decides the spelling of the flags.
        identity: changes whenever the compiler does: command, resolved path, size and time of the file.
        openmp: whether `#pragma omp` binds to torch's own runtime; if not, loops use torch_parallel_for.
        environment: variables to set for the compiler, beyond the process's own.
    """

    compiler: tuple[str, ...]
    kind: Kind
    identity: str
    openmp: bool
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def vector_extensions(self) -> bool:
        """Whether `__attribute__((vector_size(n)))` is understood: by all but Microsoft's cl."""
        return _stem(self.compiler[0]) != "cl"

    def compile_flags(self, level: SimdLevel) -> tuple[str, ...]:
        """The flags that turn one source into a shared library; they are part of a build's key."""
        if self.kind == "cl":
            wide = _SIMD_FLAGS[level] is _AVX512_FLAGS
            arch = ("/arch:AVX512",) if wide else ("/arch:AVX2",) if level == "avx2" else ()
            return ("/nologo", "/LD", "/O2", "/std:c++17", "/fp:precise", "/GR-", "/GS-", "/Zc:inline", *arch)
        flags = _CODE_FLAGS + _VALUE_FLAGS + _SIMD_FLAGS[level] + ("-shared",)
        if sys.platform != "win32":
            flags += ("-fPIC", "-fno-semantic-interposition")
        if self.openmp:
            flags += ("-fopenmp",)
        if self.kind == "gcc" and _SIMD_FLAGS[level] is _AVX512_FLAGS:
            flags += ("-mprefer-vector-width=512",)
        return flags

    @property
    def careful_flags(self) -> tuple[tuple[str, ...], ...]:
        """What to add for a source on which the compiler crashes, to be tried in turn.

        Most crashes of g++ come from instructions that its pass "combine" makes of two and cannot allocate.
        """
        if self.kind == "cl":
            return (("/Od",),)
        return (*([("-fdisable-rtl-combine",)] if self.kind == "gcc" else ()), ("-O1",), ("-O0",))

    def link_flags(self, stub: Path | None) -> tuple[str, ...]:
        """The flags after the source: what the library is bound to when it is loaded.

        `stub` is an empty library that calls itself libtorch_cpu.so (see `stub_command`). Linking against it
        records the need for libtorch_cpu, which at loading time is found in the process: Sleef,
        torch_parallel_for, libm and libgomp all resolve through it, without making libtorch_cpu's symbols
        global.
        """
        if sys.platform == "darwin":
            return ("-undefined", "dynamic_lookup")
        if sys.platform == "win32":
            imports = str(Path(torch.__file__).parent / "lib" / "torch_cpu.lib")
            return ("/link", imports) if self.kind == "cl" else (imports,)
        # libgcc has the conversions of half and of 128-bit integers; libm gives exp and its like their
        # current version. zig builds its libm from source first, so there libm comes through libtorch_cpu.
        libraries = ("-lgcc", "-lm") if self.kind == "gcc" else ()
        bind = ("-Wl,--no-as-needed", str(stub)) if stub is not None else ()
        return ("-nostdlib", *(("-nostdlib++",) if self.kind == "zig" else ()), *libraries, *bind)

    def command(
        self, source: Path, output: Path, level: SimdLevel, stub: Path | None = None
    ) -> tuple[str, ...]:
        """The command that compiles `source` into the shared library `output`."""
        if self.kind == "cl":
            return (
                *self.compiler, *self.compile_flags(level), str(source), f"/Fe{output}",
                f"/Fo{output.with_suffix('.obj')}", *self.link_flags(stub),
            )  # fmt: skip
        return (
            *self.compiler, *self.compile_flags(level), "-o", str(output), "-x", "c++", str(source),
            "-x", "none", *self.link_flags(stub),
        )  # fmt: skip

    @property
    def needs_stub(self) -> bool:
        """Whether `command` wants the empty stand-in for libtorch_cpu: on Linux and its like."""
        return self.kind != "cl" and sys.platform not in ("darwin", "win32")

    def stub_command(self, source: Path, output: Path) -> tuple[str, ...]:
        """The command that builds the stand-in for libtorch_cpu from an empty source."""
        return (
            *self.compiler, "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "-o", str(output),
            "-x", "c++", str(source), "-x", "none", "-nostdlib",
            *(("-nostdlib++",) if self.kind == "zig" else ()),
        )  # fmt: skip


def find_toolchain(cxx: str | None = None, environment: Mapping[str, str] | None = None) -> Toolchain:
    """The C++ compiler to use: `cxx`, $CXX, the platform's own, or the PyPI package ziglang.

    Arguments:
        cxx: config.cpp.cxx, a command with optional arguments; it goes before $CXX.
        environment: stands for os.environ.

    Raises:
        MissingCompilerError: there is none, or the one asked for is not there; the text says what to install.
    """
    environment = os.environ if environment is None else environment
    from_environment = environment.get("CXX")
    # The configuration takes its default from CXX, and then CXX is the name to put in an error.
    option = "CXX" if cxx == from_environment else "hotloop.config.cpp.cxx"
    for origin, command in ((option, cxx), ("CXX", from_environment)):
        if command and command.strip():
            return _from_command(origin, command, environment)
    path = environment.get("PATH")
    found = _find_visual_studio(environment) if sys.platform == "win32" else None
    if found is not None:
        return found
    for name in (
        ("clang++",)
        if sys.platform == "darwin"
        else ("cl",)
        if sys.platform == "win32"
        else ("g++", "clang++")
    ):
        resolved = shutil.which(name, path=path)
        if resolved is not None:
            return _toolchain((resolved,))
    zig = _find_zig()
    if zig is not None:
        return zig
    raise MissingCompilerError(_none_found(), hint=_what_to_install())


def _from_command(origin: str, command: str, environment: Mapping[str, str]) -> Toolchain:
    # A path with spaces, as Windows has them, is one word when it names a file.
    try:
        words = [command] if Path(command).is_file() else shlex.split(command, posix=sys.platform != "win32")
    except ValueError as error:
        raise MissingCompilerError(f"{origin} is no command: {command}: {error}") from None
    resolved = shutil.which(words[0], path=environment.get("PATH"))
    if resolved is None:
        what = "is a folder" if Path(words[0]).is_dir() else "is not there"
        raise MissingCompilerError(
            f"{origin} names the C++ compiler '{words[0]}', which {what}",
            hint=f"correct or unset {origin}; or {_what_to_install()}",
        )
    return _toolchain((resolved, *words[1:]))


def _toolchain(compiler: tuple[str, ...], environment: tuple[tuple[str, str], ...] = ()) -> Toolchain:
    kind = _kind_of(compiler)
    parallel = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    openmp = kind == "gcc" and sys.platform == "linux" and parallel
    return Toolchain(compiler, kind, _identity(compiler), openmp, environment)


def _kind_of(compiler: tuple[str, ...]) -> Kind:
    # The real compiler may stand behind ccache or env, so every word counts; a link (c++) is followed.
    names = [_stem(word) for word in compiler if not word.startswith("-")]
    names += [_stem(os.path.realpath(compiler[0]))]
    for name in names:
        if name in ("cl", "clang-cl", "icx-cl"):
            return "cl"
        if name == "zig":
            return "zig"
        if "clang" in name or name in ("icpx", "icx"):
            return "clang"
    return "clang" if sys.platform == "darwin" else "gcc"


def _stem(path: str) -> str:
    name = os.path.basename(path).lower()
    return name.removesuffix(".exe")


def _identity(compiler: tuple[str, ...]) -> str:
    parts: list[object] = list(compiler)
    for word in compiler:
        real = os.path.realpath(word)
        if os.path.isabs(word) and os.path.isfile(real):
            status = os.stat(real)
            parts.append((real, status.st_size, status.st_mtime_ns))
        elif not word.startswith("-") and (behind := shutil.which(word)) is not None:
            # "ccache g++": the compiler behind the wrapper counts as well.
            status = os.stat(behind)
            parts.append((os.path.realpath(behind), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _find_zig() -> Toolchain | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    binary = folder / ("zig.exe" if sys.platform == "win32" else "zig")
    # The binary itself: `python -m ziglang` starts a second Python for nothing. `zig c++` would build libc++
    # first.
    return _toolchain((str(binary), "cc")) if binary.is_file() else None


def _find_visual_studio(environment: Mapping[str, str]) -> Toolchain | None:
    """Microsoft's compiler out of the installed Visual Studio, with the variables of its own prompt."""
    programs = environment.get("ProgramFiles(x86)", r"C:\Program Files (x86)")
    vswhere = os.path.join(programs, "Microsoft Visual Studio", "Installer", "vswhere.exe")
    if not os.path.isfile(vswhere):
        return None
    query = [vswhere, "-latest", "-products", "*", "-property", "installationPath", "-utf8"]
    try:
        studio = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    machine = "arm64" if platform.machine().lower() in ("arm64", "aarch64") else "x64"
    tools = _newest(os.path.join(studio, "VC", "Tools", "MSVC", "*"))
    if not studio or tools is None:
        return None
    compiler = os.path.join(tools, "bin", f"Host{machine}", machine, "cl.exe")
    if not os.path.isfile(compiler):
        return None
    kit = _newest(os.path.join(programs, "Windows Kits", "10", "Lib", "*"))
    libraries = [os.path.join(tools, "lib", machine)]
    if kit is not None:
        libraries += [os.path.join(kit, part, machine) for part in ("ucrt", "um")]
    search = os.pathsep.join([os.path.dirname(compiler), environment.get("PATH", "")])
    return _toolchain(
        (compiler,),
        (("INCLUDE", os.path.join(tools, "include")), ("LIB", os.pathsep.join(libraries)), ("PATH", search)),
    )


def _newest(pattern: str) -> str | None:
    def version(path: str) -> tuple[int, ...]:
        return tuple(int(part) for part in os.path.basename(path).split(".") if part.isdigit())

    return max(glob.glob(pattern), key=version, default=None)


def _none_found() -> str:
    looked = {"darwin": "clang++", "win32": "Visual Studio and cl"}.get(
        sys.platform, "g++ and clang++ on PATH"
    )
    return f"no C++ compiler found: looked for $CXX, {looked}, and the Python package ziglang"


def _what_to_install() -> str:
    system = {
        "darwin": "install Apple's compiler (xcode-select --install)",
        "win32": "install Visual Studio's Build Tools with 'Desktop development with C++'",
    }.get(sys.platform, "install g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)")
    return (
        f"{system}, or pip install 'hotloop[toolchain]', or set CXX to a compiler; "
        'hotloop.config.missing_toolchain = "eager" runs uncompiled instead'
    )


def detect_simd(cpuinfo: str | None = None, machine: str | None = None) -> SimdLevel:
    """The widest SIMD level of this CPU, without compiling anything.

    Not ``avx512_bf16``: where it was measured, ``avx512`` is the faster one (``docs/matrix-products.md``).

    Arguments:
        cpuinfo: the text of /proc/cpuinfo; read here when not given.
        machine: the processor family, `platform.machine()` when not given.
    """
    machine = (machine or platform.machine()).lower()
    if machine in ("arm64", "aarch64"):
        return "neon"
    if machine not in ("x86_64", "amd64"):
        return "scalar"
    asked = cpuinfo is not None
    if cpuinfo is None:
        cpuinfo = _read_cpuinfo()
    levels = _levels_of(cpuinfo or "")
    if levels:
        usual = [level for level in levels if level != "avx512_bf16"]
        return usual[0] if usual[0] != "amx" or asked or _may_use_tiles() else usual[1]
    # No such file (macOS, Windows): torch asked CPUID when it was loaded. Its AVX512 has f, bw, dq and vl.
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "scalar")  # type: ignore[return-value]


def _levels_of(cpuinfo: str) -> tuple[SimdLevel, ...]:
    """The levels that the first processor in the text of /proc/cpuinfo has, the widest first."""
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            has = set(line.partition(":")[2].split())
            return (*(level for level, needs in _CPU_FLAGS.items() if has.issuperset(needs)), "scalar")
    return ()


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for AMX's tiles, as each process has to once, before its first use of them."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
    except (OSError, AttributeError):
        return False


def _read_cpuinfo() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return file.read(16384)  # the first processor is enough
    except OSError:
        return None


def machine_name(cpuinfo: str | None = None) -> str:
    """What tells this machine from others that run the same code at other speeds: its CPU, by name and model.

    Arguments:
        cpuinfo: the text of /proc/cpuinfo; read here when not given.
    """
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    wanted = ("model name", "cpu family", "model", "stepping", "cache size", "CPU part", "CPU implementer")
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found.setdefault(name.strip(), value.strip())
    described = ", ".join(f"{name} {found[name]}" for name in wanted if name in found)
    return f"{platform.machine()}, {described or platform.processor()}, {os.cpu_count()} cores"


def runnable_levels() -> tuple[SimdLevel, ...]:
    """The levels that this CPU runs, the widest first."""
    own = detect_simd()
    able: dict[SimdLevel, tuple[SimdLevel, ...]] = {
        "amx": ("amx", "avx512_bf16", "avx512", "avx2", "scalar"),
        "avx512": ("avx512", "avx2", "scalar"),
        "avx2": ("avx2", "scalar"),
        "neon": ("neon", "scalar"),
    }
    can = able.get(own, ("scalar",))
    if own == "avx512" and "avx512_bf16" in _levels_of(_read_cpuinfo() or ""):
        can = ("avx512_bf16", *can)
    return can


def choose_simd(wanted: str | None) -> SimdLevel:
    """The SIMD level to compile for: `wanted`, unless that is None or "auto", which stand for the CPU's own.

    Raises:
        OptionError: an unknown level, or one that this CPU would answer with an illegal instruction.
    """
    own = detect_simd()
    if wanted is None or wanted == "auto":
        return own
    can = runnable_levels()
    for level in SIMD_LEVELS:
        if level == wanted and level in can:
            return level
    problem = "is a level this CPU lacks" if wanted in SIMD_LEVELS else "is no SIMD level"
    raise OptionError(f"cpp.simd = '{wanted}' {problem}; this CPU runs: auto, {', '.join(can)}")
