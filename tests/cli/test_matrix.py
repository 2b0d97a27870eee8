"""The CI matrix and the support table, from manifests made here and from the real ones."""

import json
import pathlib

import pytest
import yaml

from portattn import cli, matrix, registry
from portattn.capability import Arch, Capability, Range
from portattn.manifest import Manifest, ManifestError
from portattn.problem import FEATURES

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DECODE = Capability(
    "decode", ("paged",), ("float16", "bfloat16"), devices=("cuda",), arch=Arch("sm", 80), features=("causal", "lse")
)


def manifest(name="toy", priority=1, capabilities=(DECODE,), **more):
    return Manifest(name, name, priority, tuple(capabilities), file=f"{name}/backend.yaml", **more)


def jobs(*lanes):
    return matrix.jobs({"toy": manifest(ci=lanes)})["include"]


# ------------------------------------------------------------------ the CI matrix
def test_a_lane_gets_what_it_leaves_out():
    assert jobs({"lane": "cpu"}) == [{"backend": "toy", "lane": "cpu", "os": "ubuntu-latest", "python": "3.12", "torch": "2.13.0",
                                      "level": "quick", "runner": ["ubuntu-latest"]}]


def test_lists_make_a_job_each():
    found = jobs({"lane": "cpu", "os": ["ubuntu-latest", "windows-latest"], "python": ["3.10", "3.13"]})
    assert [(j["os"], j["python"], j["runner"]) for j in found] == [
        ("ubuntu-latest", "3.10", ["ubuntu-latest"]), ("ubuntu-latest", "3.13", ["ubuntu-latest"]),
        ("windows-latest", "3.10", ["windows-latest"]), ("windows-latest", "3.13", ["windows-latest"]),
    ]


def test_runner_labels_are_kept_together():
    (job,) = jobs({"lane": "gpu", "runner": ["self-hosted", "nvidia"], "level": "full"})
    assert job["runner"] == ["self-hosted", "nvidia"] and job["os"] == "self-hosted" and job["level"] == "full"


def test_a_preset_and_the_tests_of_a_lane_reach_the_job():
    assert jobs({"lane": "emulate", "tests": "tests/a tests/b"})[0]["tests"] == "tests/a tests/b" and "tests" not in jobs({"lane": "emulate"})[0]
    assert jobs({"lane": "compile", "runner": "ubuntu-latest", "preset": "cuda"})[0]["preset"] == "cuda"


def test_versions_are_text():  # 3.10 unquoted in YAML is the number 3.1: at least never a number in the matrix
    assert jobs({"lane": "cpu", "python": 3.12})[0]["python"] == "3.12"


def test_a_misspelt_lane_key_names_file_path_and_nearest_key():
    with pytest.raises(ManifestError, match=r"toy/backend.yaml: ci\[1\]: unknown key 'runer'; did you mean 'runner'\?"):
        jobs({"lane": "cpu"}, {"lane": "gpu", "runer": "x"})


def test_a_lane_without_a_name_is_refused():
    with pytest.raises(ManifestError, match=r"ci\[0\]: missing key 'lane'"):
        jobs({"os": "ubuntu-latest"})


def test_matrix_json_is_one_line_that_github_can_read(capsys):
    assert cli.main(["matrix", "--json"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    include = json.loads(text)["include"]
    assert {"backend", "lane", "os", "runner", "python", "torch", "level"} <= set(include[0])
    assert {job["backend"] for job in include} == {name for name, m in registry.manifests().items() if m.ci}


def test_an_unknown_backend_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["matrix", "--backend", "cdua"])
    assert exit.value.code == 2 and "wanted one of cuda" in capsys.readouterr().err


def test_the_workflow_brings_a_compiler_for_every_lanes_preset():
    """Runners have no nvcc, and clang of another age."""
    file = ROOT / ".github" / "workflows" / "ci.yml"
    if not file.exists():
        pytest.skip("file: an sdist has no workflow")
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    steps = workflow["jobs"]["lane"]["steps"]
    build = next(i for i, step in enumerate(steps) if "cmake --workflow" in step.get("run", "") and step["if"] == "matrix.preset")
    for kind in {job["preset"].split("-")[0] for job in matrix.jobs(registry.manifests())["include"] if "preset" in job}:
        assert any(f"startsWith(matrix.preset, '{kind}')" in step.get("if", "") and "install" in step["run"] for step in steps[:build]), kind


def test_machines_of_a_vendor_have_one_label_and_lanes_the_tested_torch():
    include = matrix.jobs(registry.manifests())["include"]
    assert {tuple(job["runner"]) for job in include if "self-hosted" in job["runner"]} == {("self-hosted", "nvidia"), ("self-hosted", "rocm")}
    tested = matrix.LANE["torch"]  # of PyPI: a build for CUDA
    for job in include:
        if "rocm" in job["runner"]:
            assert job["torch"].startswith(f"{tested}+rocm"), job
        elif "nvidia" in job["runner"]:
            assert job["torch"] == tested, job
    assert f"torch=={tested}" in (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8").splitlines()


# ------------------------------------------------------------------ the support table
def cells(*manifests):
    lines = matrix.table({m.name: m for m in manifests}).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_rows_follow_priority_and_say_what_is_declared():
    everything = Capability(
        "any",
        ("dense", "varlen", "paged", "cache_append", "merge_states"),
        ("float32", "float16", "bfloat16"),
        kv_dtypes=("float8_e4m3fn",),
        head_dims=Range(values=(64, 128)),
        features=FEATURES,
    )
    rows = cells(manifest("slow", 1, [everything]), manifest("fast", 2))
    assert rows[0] == ["`fast`", "cuda: sm_80 or newer", "fp16, bf16", "paged", "1..256", "causal, lse", "nothing yet"]
    assert rows[1] == ["`slow`", "any torch device", "fp32, fp16, bf16 (e4m3fn)", "all", "64, 128", "all", "nothing yet"]


def test_most_features_are_told_by_those_that_lack():
    c = DECODE._replace(features=tuple(f for f in FEATURES if f not in ("grad", "bias")))
    assert cells(manifest(capabilities=[c]))[0][5] == "all but bias, grad"


RUN = {
    "device": "NVIDIA H200",
    "arch": "sm_90",
    "date": "2026-11-29",
    "level": "full",
    "passed": 812,
    "declined": 30,
    "failed": 0,
}


@pytest.mark.parametrize("verified, ci, said", [
    ([RUN], [], "run: NVIDIA H200 (sm_90), 2026-11-29, 812 passed at level full"),
    ([{**RUN, "level": "quick", "passed": 9}, RUN, {**RUN, "level": "quick", "date": "2026-11-30"}], [],
     "run: NVIDIA H200 (sm_90), 2026-11-29, 812 passed at level full"),  # the full level has the quick one's tests
    ([RUN, {**RUN, "level": "quick", "passed": 9, "failed": 1}], [], "run: NVIDIA H200 (sm_90), 2026-11-29, 9 passed at level quick, **1 FAILED**"),
    ([{**RUN, "failed": 2}], [], "run: NVIDIA H200 (sm_90), 2026-11-29, 812 passed at level full, **2 FAILED**"),
    ([{**RUN, "arch": "sm_75"}], [], "nothing yet"),  # outside of the capability's arch
    ([{**RUN, "arch": "gfx942"}], [], "nothing yet"),  # another vendor's
    ([], [{"lane": "compile"}], "compiles: in CI; not run on a device"),
    ([], [{"lane": "compile", "arch": ["sm_75", "sm_90"]}, {"lane": "emulate"}],
     "emulated: in CI; compiles: in CI for sm_90; not run on a device"),
    ([], [{"lane": "compile", "arch": [arch]} for arch in ("sm_80", "sm_90")], "compiles: in CI for sm_80, sm_90; not run on a device"),
    ([{**RUN, "how": "emulated"}], [],
     "emulated: NVIDIA H200 (sm_90), 2026-11-29, 812 passed at level full; not run on a device"),
    ([], [{"lane": "gpu"}], "nothing yet"),  # a lane that may run is no evidence that it did
])
def test_a_row_says_what_its_claim_rests_on(verified, ci, said):
    assert matrix.evidence(manifest(verified=tuple(verified), ci=tuple(ci)), DECODE) == said


def test_only_the_block_between_the_markers_is_replaced():
    old = f"# Title\n{matrix.BEGIN}\nold\n{matrix.END}\nrest \\1\n"
    assert matrix.replace_block(old, "new \\1") == f"# Title\n{matrix.BEGIN}\nnew \\1\n{matrix.END}\nrest \\1\n"


def test_write_then_check_agree_and_a_change_is_stale(tmp_path, capsys):
    file = tmp_path / "README.md"
    file.write_text(f"above\n{matrix.BEGIN}\n{matrix.END}\nbelow\n", encoding="utf-8")
    assert cli.main(["support-table", "--check", str(file)]) == 1
    assert "portattn support-table --write" in capsys.readouterr().err
    assert cli.main(["support-table", "--write", str(file)]) == 0
    assert cli.main(["support-table", "--check", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("below\n") and "`sdpa`" in text
    file.write_text(text.replace("`sdpa`", "`sdqa`"), encoding="utf-8")
    assert cli.main(["support-table", "--check", str(file)]) == 1


@pytest.mark.parametrize("content", ["no markers", matrix.END + matrix.BEGIN, None])
def test_a_file_without_markers_is_wrong_usage(tmp_path, content, capsys):
    file = tmp_path / "README.md"
    if content is not None:
        file.write_text(content)
    assert cli.main(["support-table", "--write", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_wrong_usage(tmp_path, monkeypatch, capsys):
    file = tmp_path / "README.md"
    file.write_text(matrix.BEGIN + matrix.END)
    opened = open

    def no_writing(path, mode="r", *args, **more):
        if "w" in mode:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, mode, *args, **more)

    monkeypatch.setattr("builtins.open", no_writing)
    assert cli.main(["support-table", "--write", str(file)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert file.read_text() == matrix.BEGIN + matrix.END


def test_the_readme_table_is_current():
    assert cli.main(["support-table", "--check", str(README)]) == 0, "run: portattn support-table --write README.md"


def test_a_record_of_a_device_without_an_arch_counts_for_its_device_only():
    record = {"device": "mps", "arch": "", "date": "2026-11-29", "passed": 5}
    c = DECODE._replace(devices=("mps",), arch=Arch())
    assert matrix.evidence(manifest(verified=(record,)), c).startswith("run: mps, 2026-11-29, 5 passed")
    assert matrix.evidence(manifest(verified=(record,)), DECODE) == "nothing yet"
