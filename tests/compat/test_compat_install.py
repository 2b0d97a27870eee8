"""install(): imports, find_spec and metadata answer; it is taken back without a trace; it does not shadow what is there unless told."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from portattn import ArgumentError, PortattnError, compat


@pytest.fixture(autouse=True)
def taken_back():
    before = {m: sys.modules.get(m) for m in sys.modules if m.partition(".")[0] in compat.NAMES}
    path = list(sys.meta_path)
    yield
    compat.uninstall()
    assert {m: sys.modules.get(m) for m in sys.modules if m.partition(".")[0] in compat.NAMES} == before
    assert sys.meta_path == path


def test_imports_find_portattns_functions():
    assert compat.install() == ("flash_attn", "flash_attn_interface")
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import pad_input
    from flash_attn.flash_attn_interface import _flash_attn_forward

    assert flash_attn_varlen_func is compat.flash_attn.flash_attn_varlen_func
    assert pad_input is compat.flash_attn.bert_padding.pad_input
    assert _flash_attn_forward is compat.flash_attn.flash_attn_interface._flash_attn_forward
    assert importlib.import_module("flash_attn_interface").flash_attn_func is compat.flash_attn_interface.flash_attn_func


def test_metadata_and_specs_answer():
    compat.install("flash_attn")
    import flash_attn

    assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == flash_attn.__version__
    assert flash_attn.__version__.endswith("+portattn")
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        assert importlib.util.find_spec(name).name == name
    assert importlib.util.find_spec("flash_attn.layers") is None
    assert importlib.reload(flash_attn) is flash_attn


def test_versions_are_numbers_where_engines_split_them_at_the_dots():
    compat.install()
    for name in ("flash_attn", "flash_attn_interface"):
        assert all(int(part) >= 0 for part in importlib.import_module(name).__version__.split(".")[:3])  # xformers' way
    assert importlib.import_module("flash_attn.flash_attn_interface").flash_attn_gpu is None


def test_flash_attention_3_is_the_distribution_that_engines_look_for():
    compat.install("flash_attn_interface")
    assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]  # transformers asks for this name
    assert importlib.metadata.version("flash_attn_3") == importlib.import_module("flash_attn_interface").__version__ == "3.0.0.post0+portattn"
    compat.uninstall()
    assert "flash_attn_interface" not in importlib.metadata.packages_distributions()


def test_flash_attention_3_that_is_installed_is_shadowed_only_when_told(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_3-3.0.0.dist-info").mkdir()
    (tmp_path / "flash_attn_3-3.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PortattnError, match="flash_attn_interface is installed already .distribution flash-attn-3 3.0.0"):
        compat.install()


def test_uninstall_takes_it_back():
    compat.install("flash_attn", "flashinfer")
    assert compat.uninstall("flash_attn") == ("flashinfer",)
    assert importlib.util.find_spec("flash_attn") is None and importlib.util.find_spec("flashinfer") is not None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.bert_padding")
    assert compat.uninstall() == ()


def test_a_second_install_changes_nothing():
    compat.install("flash_attn")
    module = sys.modules["flash_attn"]
    assert compat.install("flash_attn") == ("flash_attn",)
    assert sys.modules["flash_attn"] is module


def test_an_unknown_name_is_refused():
    with pytest.raises(ArgumentError, match="flash_attn.*got 'xformers'"):
        compat.install("xformers")


def test_an_imported_package_is_shadowed_only_when_told(monkeypatch):
    real, part = ModuleType("flash_attn"), ModuleType("flash_attn.ops")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.ops", part)
    with pytest.raises(PortattnError, match="flash_attn is installed already"):
        compat.install("flashinfer", "flash_attn")
    assert compat.installed() == () and sys.modules["flash_attn"] is real and "flashinfer" not in sys.modules
    compat.install("flash_attn", shadow=True)
    assert sys.modules["flash_attn"] is not real and "flash_attn.ops" not in sys.modules
    compat.uninstall()
    assert sys.modules["flash_attn"] is real and sys.modules["flash_attn.ops"] is part


def test_a_package_on_the_path_is_shadowed_only_when_told(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True\n")
    (tmp_path / "flash_attn-2.0.0.dist-info").mkdir()
    (tmp_path / "flash_attn-2.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PortattnError, match=r"flash_attn is installed already \(.*shadow=True"):
        compat.install()
    compat.install(shadow=True)
    import flash_attn

    assert not hasattr(flash_attn, "real") and importlib.metadata.version("flash_attn") != "2.0.0"
    compat.uninstall()
    assert importlib.import_module("flash_attn").real and importlib.metadata.version("flash_attn") == "2.0.0"
    del sys.modules["flash_attn"]


def run(tmp_path, *arguments):
    return subprocess.run([sys.executable, "-m", "portattn.compat.run", *arguments], capture_output=True, text=True, timeout=120)


def test_run_gives_a_script_the_modules_and_its_own_arguments(tmp_path):
    (tmp_path / "beside.py").write_text("here = 1\n")
    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent("""
        import sys, importlib.metadata, torch
        import beside
        from flash_attn import flash_attn_func
        q = torch.ones(1, 2, 1, 4)
        print(__name__, sys.argv[1:], flash_attn_func(q, q, q).sum().item(), importlib.metadata.version("flash_attn"))
    """))
    done = run(tmp_path, str(script), "--names", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["__main__", "['--names',", "'x']", "8.0", compat.flash_attn.__version__]


def test_run_of_some_names_and_of_a_module(tmp_path):
    done = run(tmp_path, "--names", "flashinfer", "-m", "timeit", "-n", "1", "-r", "1", "import flashinfer, sys; assert 'flash_attn' not in sys.modules")
    assert done.returncode == 0 and "loop" in done.stdout, done.stderr


def test_run_without_a_program_says_how(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "script.py" in done.stderr
    done = run(tmp_path, "nowhere.py")
    assert (done.returncode, done.stderr) == (2, "portattn.compat.run: there is no file nowhere.py\n")
