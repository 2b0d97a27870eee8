"""The command itself: what it lists, what it imports, and its exit codes."""

import os
import subprocess
import sys

import pytest

from portattn import cli


def portattn(*args, code=0):
    done = subprocess.run([sys.executable, "-m", "portattn", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_help_lists_every_command_and_imports_none_of_them():
    text = portattn("--help")
    assert all(name in text for name in cli.COMMANDS)
    modules = ", ".join(repr(module) for module, _, _ in cli.COMMANDS.values())
    code = (
        "import sys; from portattn.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        f"print([m for m in ({modules}) if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_explains_itself(name, capsys):
    try:
        code = cli.main([name, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0
    assert "usage: portattn " + name in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["doctr"])
    assert exit.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_no_command_prints_help_and_is_wrong_usage(capsys):
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_version_names_torch_too(capsys):
    assert cli.main(["--version"]) == 0
    assert "torch 2" in capsys.readouterr().out


def test_an_interrupt_is_one_line_and_130(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", lambda name: interrupted)
    assert cli.main(["bench"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_reader_that_leaves_makes_no_traceback():
    code = "import sys; sys.argv = ['portattn', 'support-table']; from portattn.cli import main; sys.exit(main())"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(timeout=60) == 0


def test_what_the_terminals_encoding_lacks_is_escaped_and_no_traceback():
    """A path of the user's in an encoding that cannot say it, as in a pipe on Windows."""
    command = [sys.executable, "-m", "portattn", "doctor", "--no-checks"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PORTATTN_CACHE": os.path.join(os.sep, "none", "\u00fc")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert "\\xfc" in done.stdout and "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="platform: no sh")
def test_a_closed_output_makes_no_traceback():
    done = subprocess.run(["sh", "-c", '"$0" -m portattn matrix >&-', sys.executable], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_tune_is_there_when_a_backend_has_a_tuner(tmp_path, monkeypatch, capsys):
    assert ("tune" in cli.commands()) == bool(cli._tunable())
    tmp_path /= "of [me]"  # no pattern
    (tmp_path / "toytuned").mkdir(parents=True)
    (tmp_path / "toytuned" / "__init__.py").write_text("")
    (tmp_path / "toytuned" / "tune.py").write_text("def main(argv):\n    print('tuning with', argv)\n    return 3\n")
    backends = sys.modules["portattn.backends"]
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    assert "toytuned" in cli.commands()["tune"]
    assert cli.main(["tune", "--backend", "toytuned", "--fast"]) == 3
    assert capsys.readouterr().out == "tuning with ['--fast']\n"
