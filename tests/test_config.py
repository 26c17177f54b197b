"""Options: where a value comes from, which one wins, and what a wrong one says."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.config import MODES, Config, Cpp, _warn_of_unknown_variables, config, options, resolve
from hotloop.errors import HotloopError, OptionError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for option in options().values():
        for variable in option.env:
            monkeypatch.delenv(variable, raising=False)
    config.reset()
    yield
    config.reset()


def test_defaults_are_the_dataclass() -> None:
    assert resolve() == Config()
    assert resolve("default", {}) == Config()


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().freezing = True  # type: ignore[misc]


def test_assignment_reaches_the_next_compile_only() -> None:
    before = resolve()
    hotloop.config.freezing = True
    hotloop.config.cpp.simd = "avx2"
    assert before == Config()
    assert resolve() == Config(freezing=True, cpp=Cpp(simd="avx2"))
    assert hotloop.config.freezing is True
    assert hotloop.config.cpp.simd == "avx2"
    hotloop.config.reset()
    assert resolve() == Config()


def test_options_win_over_mode_over_assignment_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("HOTLOOP_CPP_THREADS", "3")
    assert resolve().max_autotune is True
    assert config.cpp.threads == 3
    config.max_autotune = False
    assert resolve().max_autotune is False
    assert resolve("max-autotune").max_autotune is True
    assert resolve("max-autotune", {"max_autotune": False}).max_autotune is False
    assert resolve(None, {"cpp.threads": 5}).cpp.threads == 5


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        ("default", {}),
        ("reduce-overhead", {"cudagraphs": True}),
        ("max-autotune", {"cudagraphs": True, "max_autotune": True}),
        ("max-autotune-no-cudagraphs", {"max_autotune": True}),
    ],
)
def test_modes(mode: str, changed: dict[str, object]) -> None:
    assert resolve(mode) == dataclasses.replace(Config(), **changed)  # type: ignore[arg-type]
    assert mode in MODES


@pytest.mark.parametrize(
    ("mode", "given", "says"),
    [
        ("max-autotun", None, "no mode 'max-autotun'; did you mean 'max-autotune'"),
        ("fastest", None, "valid: default, max-autotune"),
        (None, {"cpp.smid": "avx2"}, "no option 'cpp.smid'; did you mean 'cpp.simd'"),
        (None, {"simd": "avx2"}, "did you mean 'cpp.simd'"),
        (None, {"freezin": True}, "did you mean 'freezing'"),
        (None, {"cpp.simd": "avx3"}, "'avx512', 'avx2', 'scalar', not 'avx3'"),
        (None, {"freezing": "yes"}, "option 'freezing' takes True or False, not 'yes'"),
        (None, {"freezing": 1}, "takes True or False, not 1"),
        (None, {"cpp.threads": True}, "takes an integer of at least 0, not True"),
        (None, {"cpp.threads": -1}, "of at least 0, not -1"),
        (None, {"cpp_wrapper": "cpp"}, "takes True or False or None"),
        (None, {"max_autotune_gemm_backends": "MKL"}, "one or more of ATEN, CPP, TRITON, CUTLASS"),
        (None, {"max_autotune_gemm_backends": ""}, "one or more of"),
        (None, {"cpp": 3}, "'cpp' is a group of options"),
        (None, {1: 2}, "an option is named by a text, not 1; valid: precision, "),
        (None, {None: True, "freezing": True}, "an option is named by a text, not None"),
        (None, ["freezing"], "options are a dict such as {\"max_autotune\": True}, not ['freezing']"),
        (["default"], None, "no mode '['default']'"),
    ],
)
def test_a_wrong_mode_or_option_says_what_is_right(mode: Any, given: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(mode, given)
    assert says in str(caught.value)
    assert isinstance(caught.value, HotloopError)
    assert isinstance(caught.value, ValueError)


def test_a_wrong_assignment_changes_nothing() -> None:
    with pytest.raises(OptionError, match="did you mean 'freezing'"):
        config.freezng = True
    with pytest.raises(OptionError, match="takes one of"):
        config.on_error = "ignore"
    with pytest.raises(AttributeError, match="did you mean 'freezing'"):
        _ = config.freezng
    assert resolve() == Config()


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HOTLOOP_CHECK", "1", "check", True),
        ("HOTLOOP_CHECK", "off", "check", False),
        ("HOTLOOP_CACHE_DIR", "/somewhere", "cache_dir", "/somewhere"),
        ("HOTLOOP_CPP_SIMD", "scalar", "cpp.simd", "scalar"),
        ("HOTLOOP_CPP_WRAPPER", "none", "cpp_wrapper", None),
        ("HOTLOOP_CPP_WRAPPER", "0", "cpp_wrapper", False),
        ("HOTLOOP_OVERRIDE", "/edited", "override_dir", "/edited"),
        ("HOTLOOP_MEMORY_POOL_LIMIT", "4096", "memory_pool_limit", 4096),
        ("HOTLOOP_MAX_AUTOTUNE_GEMM_BACKENDS", "cpp, ATEN", "max_autotune_gemm_backends", ("CPP", "ATEN")),
        ("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "CPP", "max_autotune_gemm_backends", ("CPP",)),
        ("TORCHINDUCTOR_FREEZING", "1", "freezing", True),
        ("TORCH_COMPILE_DEBUG", "1", "debug", True),
        ("CXX", "clang++ -m64", "cpp.cxx", "clang++ -m64"),
        ("CXX", "", "cpp.cxx", None),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert resolve().get(name) == value
    assert config.get(name) == value


def test_own_variable_wins_over_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("HOTLOOP_FREEZING", "0")
    assert resolve().freezing is False


def test_a_wrong_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_CPP_SIMD", "neon")
    with pytest.raises(OptionError, match="not 'neon' \\(set by HOTLOOP_CPP_SIMD\\)"):
        resolve()
    with pytest.raises(OptionError, match="HOTLOOP_CPP_SIMD"):
        _ = config.cpp.simd


def test_patch_nests_and_undoes() -> None:
    config.check = True
    with config.patch({"cpp.simd": "scalar"}, check=False):
        assert resolve() == Config(cpp=Cpp(simd="scalar"))
        with config.patch(freezing=True):
            assert resolve().freezing
            config.freezing = False  # inside a patch of the same option: until the patch ends
            config.on_error = "eager"  # not patched: stays
            assert not resolve().freezing
        assert resolve() == Config(cpp=Cpp(simd="scalar"), on_error="eager")
    assert resolve() == Config(check=True, on_error="eager")
    with pytest.raises(OptionError, match="did you mean"), config.patch(freezin=True):
        pass


def test_patch_belongs_to_its_thread() -> None:
    seen: list[bool] = []
    with config.patch(freezing=True):
        thread = threading.Thread(target=lambda: seen.append(resolve().freezing))
        thread.start()
        thread.join()
    assert seen == [False]


def test_code_key_holds_exactly_the_options_that_change_code() -> None:
    key = Config().code_key()
    assert key == Config().code_key()
    names = [line.partition("=")[0] for line in key.splitlines()]
    assert names == [name for name, option in options().items() if option.code]
    assert Config(cpp=Cpp(simd="avx2")).code_key() != key
    assert Config(precision="eager").code_key() != key
    assert Config(check=True, debug=True, cache_dir="/x", on_error="eager").code_key() == key


def test_every_option_is_documented_and_shown() -> None:
    text = config.describe()
    for name, option in options().items():
        assert len(option.doc) > 20, name
        assert f"{name} = " in text
        assert option.env[0] in text
        assert name.partition(".")[0] in dir(config)
        shown = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
        assert shown.endswith(" (no effect yet)") is not option.used
    assert "simd" in dir(config.cpp)
    assert "hotloop.config.cpp.simd = 'auto'" in repr(config)


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is how Linux names the folder")
def test_default_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve().cache_dir == str(tmp_path / "hotloop")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert resolve().cache_dir == "/home/somebody/.cache/hotloop"


def test_importing_hotloop_is_light() -> None:
    code = "import sys, hotloop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


def test_an_unknown_variable_is_a_warning_that_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_CPP_SMID", "scalar")
    _warn_of_unknown_variables.cache_clear()
    with pytest.warns(RuntimeWarning, match="HOTLOOP_CPP_SMID.*did you mean 'HOTLOOP_CPP_SIMD'"):
        resolve()
    monkeypatch.setenv("HOTLOOP_FOO", "1")  # HOTLOOP_ alone makes nothing similar
    _warn_of_unknown_variables.cache_clear()
    with pytest.warns(RuntimeWarning, match="'HOTLOOP_FOO'; valid: HOTLOOP_.*HOTLOOP_UNFUSED"):
        resolve()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve()  # once a process
