"""The compiler is found without being run, its flags change no value, and its threads are torch's."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.errors import OptionError, ToolchainError
from hotloop.runtime import toolchain as module
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import Toolchain, choose_simd, detect_simd, find_toolchain

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's ways")

# What the code generator prints where `#pragma omp` is not to be had.
PARALLEL_FOR = """
typedef long long i64;
extern "C" int torch_parallel_for(i64 begin, i64 end, i64 grain, void (*body)(i64, i64, void *), void *);
extern "C" int torch_get_num_threads(unsigned *threads);

struct double_it_arguments { const float *x; float *out; };

static void double_it_body(i64 begin, i64 end, void *context) {
    const double_it_arguments &a = *(const double_it_arguments *)context;
    for (i64 i = begin; i < end; i++)
        a.out[i] = a.x[i] * 2.0f;
}

extern "C" void double_it(const float *x, float *out, i64 n) {
    double_it_arguments arguments = {x, out};
    torch_parallel_for(0, n, 4096, double_it_body, &arguments);
}

extern "C" void threads(unsigned *count) { torch_get_num_threads(count); }
"""

OPENMP = """
extern "C" int omp_get_num_threads();
extern "C" float expf(float);
extern "C" void threads(unsigned *count) {
    #pragma omp parallel
    {
        #pragma omp single
        *count = omp_get_num_threads();
    }
}
extern "C" void exponential(float *x) { *x = expf(*x); }
"""


def _program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\nexit 7\n")
    path.chmod(0o755)
    return path


@linux
def test_order_of_search(tmp_path: Path) -> None:
    clang = _program(tmp_path, "clang++")
    environment = {"PATH": str(tmp_path)}
    assert find_toolchain(environment=environment).compiler == (str(clang),)
    gcc = _program(tmp_path, "g++")
    found = find_toolchain(environment=environment)
    assert (found.compiler, found.kind) == ((str(gcc),), "gcc")
    other = _program(tmp_path, "my-clang++-17")
    found = find_toolchain(environment={**environment, "CXX": "my-clang++-17 --gcc-toolchain=/x"})
    assert (found.compiler, found.kind) == ((str(other), "--gcc-toolchain=/x"), "clang")
    assert not found.openmp and found.vector_extensions
    assert find_toolchain(str(gcc), {**environment, "CXX": "my-clang++-17"}).kind == "gcc"


@linux
def test_nothing_is_run_to_find_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "posix_spawn", refuse)
    monkeypatch.setattr(os, "system", refuse)
    assert find_toolchain().identity
    assert detect_simd() in module.SIMD_LEVELS


@linux
def test_a_wrapper_is_seen_through(tmp_path: Path) -> None:
    _program(tmp_path, "ccache")
    _program(tmp_path, "clang++")
    found = find_toolchain(environment={"PATH": str(tmp_path), "CXX": "ccache clang++"})
    assert found.kind == "clang"


@linux
@pytest.mark.parametrize(
    ("name", "kind", "vectors"),
    [("cl.exe", "cl", False), ("clang-cl", "cl", True), ("icx-cl", "cl", True), ("icpx", "clang", True)],
)
def test_kinds(tmp_path: Path, name: str, kind: str, vectors: bool) -> None:
    found = find_toolchain(str(_program(tmp_path, name)))
    assert (found.kind, found.vector_extensions, found.openmp) == (kind, vectors, False)


def test_a_path_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "Program Files"
    folder.mkdir()
    path = _program(folder, "g++")
    assert find_toolchain(str(path)).compiler == (str(path),)


@linux
def test_identity_follows_the_file(tmp_path: Path) -> None:
    path = _program(tmp_path, "g++")
    environment = {"PATH": str(tmp_path)}
    first = find_toolchain(environment=environment).identity
    assert find_toolchain(environment=environment).identity == first
    path.write_text("#!/bin/sh\nexit 8 # another version\n")
    assert find_toolchain(environment=environment).identity != first


@linux
def test_ziglang_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    _program(package, "zig")
    monkeypatch.syspath_prepend(str(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    found = find_toolchain(environment={"PATH": str(empty)})
    assert (found.compiler, found.kind) == ((str(package / "zig"), "cc"), "zig")
    assert not found.openmp


def test_visual_studio_without_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studio = tmp_path / "Studio"
    compiler = None
    for version in ("14.9.1", "14.38.33130"):
        folder = studio / "VC" / "Tools" / "MSVC" / version / "bin" / "Hostx64" / "x64"
        folder.mkdir(parents=True)
        compiler = folder / "cl.exe"
        compiler.write_text("")
    (tmp_path / "Windows Kits" / "10" / "Lib" / "10.0.22621.0").mkdir(parents=True)
    installer = tmp_path / "Microsoft Visual Studio" / "Installer"
    installer.mkdir(parents=True)
    vswhere = installer / "vswhere.exe"
    vswhere.write_text(f"#!/bin/sh\necho '{studio}'\n")
    vswhere.chmod(0o755)
    monkeypatch.setattr(module.platform, "machine", lambda: "AMD64")
    found = module._find_visual_studio({"ProgramFiles(x86)": str(tmp_path), "PATH": "C:"})
    assert found is not None
    assert (found.compiler, found.kind) == ((str(compiler),), "cl")
    environment = dict(found.environment)
    assert "14.38.33130" in environment["LIB"] and "10.0.22621.0" in environment["LIB"]
    vswhere.unlink()
    assert module._find_visual_studio({"ProgramFiles(x86)": str(tmp_path)}) is None


@pytest.mark.parametrize(
    ("flags", "machine", "level"),
    [
        ("fma avx f16c avx2 avx512f avx512dq avx512bw avx512vl", "x86_64", "avx512"),
        ("fma avx f16c avx2 avx512f", "x86_64", "avx2"),
        ("fma avx avx2", "x86_64", "scalar"),
        ("", "x86_64", "scalar"),
        ("", "aarch64", "neon"),
        ("avx2 fma f16c", "riscv64", "scalar"),
    ],
)
def test_simd_level(flags: str, machine: str, level: str) -> None:
    assert detect_simd(f"processor : 0\nflags\t\t: fpu {flags}\n", machine) == level


def test_simd_level_agrees_with_torch() -> None:
    expected = {"AVX512": "avx512", "AVX2": "avx2"}
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in expected and "ATEN_CPU_CAPABILITY" not in os.environ:
        assert detect_simd() == expected[capability]


def test_forced_simd_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "detect_simd", lambda: "avx2")
    assert choose_simd("scalar") == "scalar"
    assert choose_simd("auto") == choose_simd(None) == "avx2"
    with pytest.raises(OptionError, match=r"avx512.*lacks; this CPU runs: auto, avx2, scalar"):
        choose_simd("avx512")
    with pytest.raises(OptionError, match="no SIMD level"):
        choose_simd("sse9")


@pytest.mark.parametrize("level", module.SIMD_LEVELS)
@pytest.mark.parametrize("kind", ["gcc", "clang", "zig", "cl"])
def test_no_flag_changes_values(kind: module.Kind, level: module.SimdLevel) -> None:
    flags = Toolchain(("c++",), kind, "", openmp=kind == "gcc").compile_flags(level)
    assert not [
        flag
        for flag in flags
        if any(bad in flag for bad in ("fast", "associative", "finite", "unsafe", "reciprocal", "native"))
    ]
    assert kind == "cl" or "-ffp-contract=off" in flags


@linux
def test_threads_are_those_of_torch(tmp_path: Path) -> None:
    toolchain = find_toolchain()
    if not toolchain.openmp:
        pytest.skip("no GCC here")
    library = Builder(toolchain, Cache(tmp_path / "cache")).build([Source("omp", OPENMP)])[0]
    count = ctypes.c_uint()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            library.function("threads")(ctypes.byref(count))
            assert count.value == threads
    finally:
        torch.set_num_threads(before)
    x = ctypes.c_float(1.0)
    library.function("exponential")(ctypes.byref(x))
    assert x.value == pytest.approx(2.7182817)
    maps = Path("/proc/self/maps").read_text()
    library_name = re.compile(r"^lib[a-z]*omp[-.0-9a-f]*\.so")
    runtimes = {line.split()[-1] for line in maps.splitlines() if library_name.match(line.rsplit("/", 1)[-1])}
    assert len(runtimes) == 1, runtimes
    assert str(Path(torch.__file__).parent) in runtimes.pop()


@linux
def test_parallel_for_without_openmp(tmp_path: Path) -> None:
    library = Builder(find_toolchain(), Cache(tmp_path / "cache")).build([Source("loop", PARALLEL_FOR)])[0]
    x = torch.randn(100_003)
    out = torch.zeros_like(x)
    count = ctypes.c_uint()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out.zero_()
            library.function("double_it", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong])(
                x.data_ptr(), out.data_ptr(), x.numel()
            )
            library.function("threads")(ctypes.byref(count))
            assert torch.equal(out, x * 2) and count.value == threads
    finally:
        torch.set_num_threads(before)


@linux
def test_contraction_and_wrapping(tmp_path: Path) -> None:
    text = """
    extern "C" void f(double *x) { x[3] = x[0] * x[1] + x[2]; }
    extern "C" void g(int *x) { x[1] = x[0] + 1 < x[0]; x[0] += 1; }
    """
    library = Builder(find_toolchain(), Cache(tmp_path / "cache")).build([Source("values", text)])[0]
    a, b = 1.0 + 2.0**-30, 1.0 - 2.0**-30
    x = (ctypes.c_double * 4)(a, b, -1.0, 0.0)
    library.function("f")(x)
    assert x[3] == a * b - 1.0 == 0.0  # contracted it would be -2^-60
    y = (ctypes.c_int * 2)(2**31 - 1, 0)
    library.function("g")(y)
    assert list(y) == [-(2**31), 1]


@linux
def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError) as caught:
        find_toolchain(environment={"PATH": str(tmp_path)})
    text = str(caught.value)
    for expected in ("g++", "apt-get install g++", "pip install 'hotloop[toolchain]'", "missing_toolchain"):
        assert expected in text
    with pytest.raises(ToolchainError, match=r"CXX names the C\+\+ compiler 'gone\+\+'"):
        find_toolchain(environment={"PATH": str(tmp_path), "CXX": "gone++"})
