"""What `stepscope tune` finds in public training scripts, and whether its patch gives the same.

    python -m benchmarks.tune_scripts --out DIR [--minutes 20] [--only NAME] [--device cuda]

The scripts in SCRIPTS are fetched at a commit into `--clones` (benchmarks/.clones); a clone that is
there is used as it is. Each is unpacked into DIR with small data made on the spot, becomes a
repository of its own there, and is tuned. The printed patch is applied as a second commit, which
`stepscope lab` measures against the original. DIR has a JSON file for each script; a second call
does the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import report, say
from stepscope.lab.folder import SWEEP_JSON

ROOT = Path(__file__).resolve().parents[1]
PATCHED = "patched"
EXAMPLES = ("https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
NANO_GPT = ("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
MIN_GPT = ("https://github.com/karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26")
MAKEMORE = ("https://github.com/karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4")
BASICS = ("https://github.com/yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db")
CHARACTERS = np.array(list("abcdefghijklmnopqrstuvwxyz ,.\nABCDEFGHIJKLMNOPQRSTUVWXYZ!'"))


class BenchmarkError(Exception):
    """Why a script was not measured."""


def no_data(_: Path) -> None:
    """Leave a script that makes its data itself."""


def text(folder: Path) -> None:
    """Write `input.txt`, of random characters."""
    drawn = np.random.default_rng(0).choice(CHARACTERS, 200_000)
    (folder / "input.txt").write_text("".join(drawn), "utf-8")


def tokens(folder: Path) -> None:
    """Write a data set of nanoGPT."""
    data = folder / "data" / "random"
    data.mkdir()
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(0, 64, 200_000, np.uint16).tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def words(folder: Path) -> None:
    """Write the missing part of WikiText-2: random words."""
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(0, 2000, 30)) for _ in range(4000)]
    (folder / "data" / "wikitext-2" / "train.txt").write_text("\n".join(lines), "utf-8")


def cora(folder: Path) -> None:
    """Write a random graph in the format of Cora, with two thirds of its nodes."""
    rng = np.random.default_rng(0)
    data, nodes = folder / "cora", 1800
    data.mkdir()
    features = (rng.random((nodes, 1433)) < 0.02).astype(int)
    rows = [f"{i} {' '.join(map(str, one))} class{i % 7}" for i, one in enumerate(features)]
    (data / "cora.content").write_text("\n".join(rows), "utf-8")
    np.savetxt(data / "cora.cites", rng.integers(0, nodes, (5429, 2)), "%d")


def basics(folder: Path) -> None:
    """Write MNIST two folders up."""
    mnist(folder.parent)


def mnist(folder: Path) -> None:
    """Write random images in the files of MNIST, which torchvision then does not download."""
    rng = np.random.default_rng(0)
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        images = np.array([0x803, count, 28, 28], ">u4").tobytes() + rng.bytes(count * 784)
        labels = np.array([0x801, count], ">u4").tobytes()
        labels += rng.integers(0, 10, count, np.uint8).tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A public script: `file` in `folder` of `source`, a repository's URL and commit.

    `cuda` are changed arguments on a GPU, `without` are paths that `data` replaces.
    """

    source: tuple[str, str]
    folder: str
    file: str
    arguments: Sequence[str] = ()
    cuda: Sequence[str] = ()
    data: Callable[[Path], None] = no_data
    needs: Sequence[str] = ()
    without: Sequence[str] = ()


MNIST_PACKAGES = ("torchvision",)


def of_basics(folder: str) -> Script:
    """Return a script of yunjey/pytorch-tutorial that trains on MNIST."""
    return Script(
        source=BASICS,
        folder=f"tutorials/{folder}",
        file="main.py",
        data=basics,
        needs=MNIST_PACKAGES,
    )


SCRIPTS: dict[str, Script] = {
    "nanoGPT": Script(
        source=NANO_GPT,
        folder=".",
        file="train.py",
        arguments=(
            *("--device=cpu", "--compile=False", "--dtype=float32", "--dataset=random"),
            *("--n_layer=2", "--n_head=4", "--n_embd=128", "--block_size=64", "--batch_size=8"),
            *("--gradient_accumulation_steps=1", "--eval_iters=1", "--out_dir={out}"),
        ),
        cuda=(
            *("--device=cuda", "--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256"),
            "--batch_size=32",
        ),
        data=tokens,
    ),
    "minGPT chargpt": Script(
        source=MIN_GPT,
        folder=".",
        file="projects/chargpt/chargpt.py",
        arguments=(
            *("--system.work_dir='{out}'", "--model.model_type=gpt-nano", "--data.block_size=64"),
            *("--trainer.batch_size=16", "--trainer.num_workers=0"),
        ),
        cuda=("--model.model_type=gpt-mini", "--data.block_size=128", "--trainer.batch_size=64"),
        data=text,
    ),
    "makemore": Script(
        source=MAKEMORE,
        folder=".",
        file="makemore.py",
        arguments=("--work-dir", "{out}", "--num-workers", "0", "--device", "cpu"),
        cuda=("--device", "cuda"),
        needs=("tensorboard",),
    ),
    "word_language_model": Script(
        source=EXAMPLES,
        folder="word_language_model",
        file="main.py",
        arguments=("--use-optimizer", "--lr", "0.001", "--emsize", "64", "--nhid", "64"),
        cuda=("--accel", "--emsize", "400", "--nhid", "400"),
        data=words,
        without=("*/wikitext-2/train.txt",),
    ),
    "gat": Script(
        source=EXAMPLES,
        folder="gat",
        file="main.py",
        arguments=("--epochs", "100000", "--hidden-dim", "16", "--num-heads", "2"),
        cuda=("--hidden-dim", "64", "--num-heads", "8"),
        data=cora,
        needs=("requests",),
    ),
    "minGPT adder": Script(
        source=MIN_GPT,
        folder=".",
        file="projects/adder/adder.py",
        arguments=("--system.work_dir='{out}'", "--trainer.num_workers=0"),
    ),
    "imagenet": Script(
        source=EXAMPLES,
        folder="imagenet",
        file="main.py",
        arguments=(
            *("--dummy", "--arch", "mobilenet_v3_small", "--batch-size", "4"),
            *("--workers", "0"),
        ),
        cuda=("--batch-size", "64"),
        needs=MNIST_PACKAGES,
    ),
    "dcgan": Script(
        source=EXAMPLES,
        folder="dcgan",
        file="main.py",
        arguments=(
            *("--dataset", "fake", "--outf", "{out}", "--workers", "0"),
            *("--batchSize", "16", "--ngf", "16", "--ndf", "16"),
        ),
        cuda=("--accel", "--batchSize", "64", "--ngf", "64", "--ndf", "64"),
        needs=MNIST_PACKAGES,
    ),
    "mnist": Script(
        source=EXAMPLES,
        folder="mnist",
        file="main.py",
        data=mnist,
        needs=MNIST_PACKAGES,
    ),
    "vae": Script(
        source=EXAMPLES,
        folder="vae",
        file="main.py",
        data=mnist,
        needs=MNIST_PACKAGES,
    ),
    "logistic_regression": of_basics("01-basics/logistic_regression"),
    "feedforward": of_basics("01-basics/feedforward_neural_network"),
    "convolutional": of_basics("02-intermediate/convolutional_neural_network"),
    "siamese_network": Script(
        source=EXAMPLES, folder="siamese_network", file="main.py", data=mnist, needs=MNIST_PACKAGES
    ),
}


def run(*command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command with its output captured; raise BenchmarkError with its last line."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if check and done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchmarkError(f"{' '.join(command[:4])}: exit code {done.returncode}: {last}")
    return done


def git(*command: str, cwd: Path) -> str:
    """Run git; return its output. Raises BenchmarkError."""
    identity = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    return run("git", *identity, *command, cwd=cwd).stdout


def clone(source: tuple[str, str], clones: Path) -> Path:
    """Return the clone of a repository, fetched if it is missing. Raises BenchmarkError."""
    url, commit = source
    folder = clones / url.rsplit("/", 1)[1]
    if not folder.is_dir():
        folder.mkdir(parents=True)
        try:
            git("init", "--quiet", cwd=folder)
            git("fetch", "--quiet", "--depth", "1", url, commit, cwd=folder)
        except BenchmarkError:
            shutil.rmtree(folder)
            raise
    return folder


def unpack(script: Script, clones: Path, into: Path) -> Path:
    """Create a repository with the script and its data; return the script's folder."""
    missing = [name for name in script.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchmarkError(f"Needs {', '.join(missing)}.")
    archive = into.parent / f"{into.name}.tar"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    source = clone(script.source, clones)
    paths = (script.folder, *(f":(exclude){path}" for path in script.without))
    git("archive", f"--output={archive}", script.source[1], "--", *paths, cwd=source)
    run("tar", "-xf", str(archive), cwd=into)
    archive.unlink()
    script.data(into / script.folder)
    for command in (("init", "--quiet"), ("add", "--all", "--force"), ("commit", "-qm", "public")):
        git(*command, cwd=into)
    return into / script.folder


def commit(folder: Path, file: str, content: str, tag: str) -> None:
    """Commit a changed script as a tag; the working tree stays the original."""
    original = (folder / file).read_text("utf-8")
    (folder / file).write_text(content, "utf-8")
    git("commit", "--quiet", "--all", "-m", tag, cwd=folder)
    git("tag", tag, cwd=folder)
    (folder / file).write_text(original, "utf-8")
    git("commit", "--quiet", "--all", "-m", "public again", cwd=folder)


def apply(diff: str, file: Path) -> str:
    """Return the content of a file with a unified diff applied. Raises BenchmarkError."""
    patched, patch = file.with_name("patched.new"), file.with_name("patch.new")
    patch.write_text(diff, "utf-8")
    try:
        run("patch", "-s", "-r", "-", "-o", str(patched), str(file), str(patch), cwd=file.parent)
        return patched.read_text("utf-8")
    finally:
        for one in (patched, patch):
            one.unlink(missing_ok=True)


def stepscope(command: str, words: Sequence[str], cwd: Path, log: Path) -> int:
    """Run a command of stepscope with its output in a file; return the exit code."""
    # The current folder, also that of another revision, has the package of some scripts.
    path = os.pathsep.join(filter(None, (str(ROOT), ".", os.environ.get("PYTHONPATH", ""))))
    with log.open("w", encoding="utf-8") as output:
        return subprocess.call(
            [sys.executable, "-m", "stepscope.cli", command, *words],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def measure(script: Script, own: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tune a script, then measure its patch. Raises BenchmarkError."""
    own.mkdir(parents=True, exist_ok=True)
    folder = unpack(script, options.clones.resolve(), own / "source")
    given = script.cuda if options.device == "cuda" else ()
    call = [script.file, *script.arguments, *given]
    sweep_folder, began = own / "tune", time.monotonic()
    shutil.rmtree(sweep_folder, ignore_errors=True)
    budget = ["--minutes", f"{options.minutes:g}", "--folder", str(sweep_folder)]
    code = stepscope("tune", [*budget, *call], folder, own / "tune.log")
    took = time.monotonic() - began
    if not (sweep_folder / SWEEP_JSON).is_file():
        raise BenchmarkError(f"tune: exit code {code}: {last_line(own / 'tune.log')}")
    sweep = json.loads((sweep_folder / SWEEP_JSON).read_text("utf-8"))
    found: dict[str, Any] = {"seconds": took, "status": sweep["status"], "reason": sweep["reason"]}
    found["variants"] = {variant["name"]: variant["text"] for variant in sweep["variants"]}
    found["tune"] = chosen(sweep["best"]) if sweep["best"] else None
    if sweep["best"] and (sweep_folder / "patch.json").is_file():
        patch = json.loads((sweep_folder / "patch.json").read_text("utf-8"))
        found |= {"lines": added(patch["diff"]), "by_hand": len(patch["by_hand"])}
        if patch["diff"]:
            commit(folder, script.file, apply(patch["diff"], folder / script.file), PATCHED)
            found |= compared(call, folder, own, options.max_rounds)
    return found


def chosen(best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the combination of a sweep with its factor and interval."""
    factors = {key: 1 + best[key] for key in ("effect", "low", "high") if best[key] is not None}
    return {"settings": best["variants"], **factors}


def added(diff: str) -> int:
    """Return the number of lines that a diff adds."""
    return sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    return (log.read_text("utf-8").strip().splitlines() or ["no output"])[-1][:300]


def compared(call: Sequence[str], folder: Path, own: Path, max_rounds: int) -> dict[str, Any]:
    """Return the patch's factor against the original, and the change of peak memory."""
    shutil.rmtree(own / "lab", ignore_errors=True)
    rounds = ["--no-combination", "--max-rounds", str(max_rounds), "--folder", str(own / "lab")]
    words = ["--variant", f"rev:{PATCHED}", *rounds, *call]
    code = stepscope("lab", words, folder, own / "lab.log")
    if code:
        return {"lab": f"exit code {code}: {last_line(own / 'lab.log')}"}
    sweep = json.loads((own / "lab" / SWEEP_JSON).read_text("utf-8"))
    (variant,) = sweep["variants"]
    patched: dict[str, Any] = {"text": variant["text"]}
    if variant["effect"] is not None:
        patched |= {key: 1 + variant[key] for key in ("effect", "low", "high")}
        for key in ("peak_allocated", "peak_process"):
            before, after = sweep["baseline"]["metrics"][key], variant["metrics"][key]
            if before and after:
                patched["peak"] = after / before - 1
                break
    return {PATCHED: patched}


def within(result: Mapping[str, Any]) -> bool | None:
    """Return whether the patch's factor lies within the interval of the tuned one."""
    tuned, patched = result.get("tune"), result.get(PATCHED, {})
    if not tuned or "effect" not in patched:
        return None
    return bool(tuned["low"] <= patched["effect"] <= tuned["high"])


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results in Markdown."""

    def factor(found: Mapping[str, Any] | None) -> str:
        if not found or "effect" not in found:
            return str((found or {}).get("text", ""))
        return f"{found['effect']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"

    lines = [
        "| Script | Settings | Factor | Patch: lines (by hand) | Patch: factor | Within "
        "| Peak memory | Minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        if "seconds" not in one:
            lines.append(f"| {name} | not measured: {one['reason']} | | | | | | |")
            continue
        tuned, patched = one["tune"], one.get(PATCHED, {})
        settings = " + ".join(tuned["settings"]) if tuned else "nothing pays"
        if one["status"] != "finished":
            settings = f"{one['status']}: {one['reason']}"
        count = f"{one['lines']} ({one['by_hand']})" if "lines" in one else ""
        peak = f"{patched['peak']:+.1%}" if "peak" in patched else ""
        agrees = {None: "", True: "yes", False: "no"}[within(one)]
        cells = [settings, factor(tuned), count, factor(patched), agrees, peak]
        cells.append(f"{one['seconds'] / 60:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure; print the table, and one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=20.0, help="budget of tune per script")
    parser.add_argument("--max-rounds", type=int, default=8, help="rounds for the patch")
    parser.add_argument("--only", action="append", choices=SCRIPTS, help="may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clones", type=Path, default=ROOT / "benchmarks/.clones")
    options = parser.parse_args()
    load, results = os.getloadavg()[0], {}
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in options.only or SCRIPTS:
        file = out / f"{name.replace(' ', '-')}.json"
        if not file.is_file():
            try:
                results[name] = measure(SCRIPTS[name], file.with_suffix(""), options)
                file.write_text(json.dumps(results[name], indent=1), "utf-8")
            except BenchmarkError as error:  # not written: tried again by the next call
                results[name] = {"reason": str(error)}
        else:
            results[name] = json.loads(file.read_text("utf-8"))
        say(f"{name}: {results[name]}")
    print(table(results))
    given = {key: str(value) for key, value in vars(options).items()}
    report("tune_scripts", given, load, {"targets": {}, "scripts": results})


if __name__ == "__main__":
    main()
