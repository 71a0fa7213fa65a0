"""The `mmattn` command: what it reads, what it prints, where, and with which exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mmattn
from mmattn.cli import experiment, main, resource
from mmattn.cli.console import quiet_start
from mmattn.cli.photos import photos

COMMANDS = ("caption", "translate", "generate", "fill", "classify", "info", "train", "evaluate")


@dataclass(frozen=True)
class FakeCaption:
    text: str
    score: float = -0.5
    confidence: float = 0.6
    low_confidence: bool = False
    ids: tuple[int, ...] = ()
    alternatives: tuple[Any, ...] = ()


class FakeError(Exception):
    reason = "it is no picture"


class FakeCaptioner:
    """Reads a text file in the place of a photo: its words are the caption. 'bad' can't be read, 'unsure' is unsure."""

    calls: list[list[Any]]
    drawn: list[Path]

    @classmethod
    def load(cls, name: str | None) -> FakeCaptioner:
        from mmattn.bundle import BundleError

        if name == "broken":
            raise BundleError("weights.npz: it was changed")
        cls.calls, cls.drawn = [], []
        return cls()

    def caption(
        self, images: list[Any], *, nbest: int, batch_size: int, on_error: str, num_beams: int = 3
    ) -> list[Any]:
        if nbest > num_beams > 1:
            raise ValueError(f"nbest={nbest} captions need at least as many beams; there are {num_beams}")
        if images:
            self.calls.append(images)
        return [self._one(image, nbest) for image in images]

    def _one(self, image: Any, nbest: int) -> Any:
        try:
            text = image.decode() if isinstance(image, bytes) else Path(image).read_text()
        except OSError as error:
            raised = FakeError(str(error))
            raised.reason = "there is no such file"
            return raised
        others = tuple(FakeCaption(f"{text} {n}", -n) for n in range(2, nbest + 1))
        return FakeError() if text == "bad" else FakeCaption(text, low_confidence=text == "unsure", alternatives=others)

    def save_attention(self, image: Any, path: Path, caption: FakeCaption) -> None:
        assert not path.exists()
        path.write_text(caption.text)
        self.drawn.append(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a Captioner that reads text files."""
    pytest.importorskip("mmattn.bundle")
    module = types.ModuleType("mmattn.inference")
    module.Captioner = FakeCaptioner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmattn.inference", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.jpg").write_text(text)


def test_each_photo_gives_one_line_in_the_order_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, a="a dog", b="a cat")
    assert main(["caption", "b.jpg", "a.jpg"]) == 0
    assert capsys.readouterr() == ("b.jpg\ta cat\na.jpg\ta dog\n", "")


def test_a_bad_photo_goes_to_stderr_and_the_others_are_captioned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, a="a dog", b="bad", c="unsure")
    assert main(["caption", "a.jpg", "b.jpg", "missing.jpg", "c.jpg"]) == 1
    out, err = capsys.readouterr()
    assert out == "a.jpg\ta dog\nc.jpg\tunsure\t[low confidence]\n"
    assert err == "mmattn: b.jpg: it is no picture\nmmattn: missing.jpg: there is no such file\n"


def test_json_gives_one_object_a_photo_failures_included(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, a="犬", b="bad")
    name = os.fsdecode(b"\xff.jpg")
    assert main(["caption", "--json", "--nbest", "2", "a.jpg", "b.jpg", name]) == 1
    out = capsys.readouterr().out
    assert "犬" in out
    first, second, third = map(json.loads, out.splitlines())
    assert first["caption"] == "犬" and first["alternatives"] == [{"caption": "犬 2", "score": -2}]
    assert set(first) == {"image", "caption", "score", "confidence", "low_confidence", "alternatives"}
    assert second == {"image": "b.jpg", "error": "it is no picture"}
    assert third["image"] == name


def test_nbest_gives_that_many_lines_with_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, a="a dog")
    assert main(["caption", "a.jpg", "--nbest", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.jpg\ta dog\t-0.5000",
        "a.jpg\ta dog 2\t-2.0000",
        "a.jpg\ta dog 3\t-3.0000",
    ]


def test_a_name_with_control_characters_stays_on_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a\n\tb.jpg").write_text("a dog")
    assert main(["caption", "a\n\tb.jpg"]) == 0
    assert capsys.readouterr().out == "a\\n\\tb.jpg\ta dog\n"


def test_a_caption_and_a_reason_cannot_command_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, a="a \x1b[31mred\x9b2J\ndog")
    assert main(["caption", "a.jpg"]) == 0
    assert capsys.readouterr().out == "a.jpg\ta \\x1b[31mred\\x9b2J\\ndog\n"
    assert main(["caption", "a.jpg", "--json"]) == 0
    line = capsys.readouterr().out
    assert line.rstrip("\n").isprintable() and json.loads(line)["caption"] == "a \x1b[31mred\x9b2J\ndog"
    assert main(["info", "\x1b[2J"]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_pictures_written_before_are_no_photos_of_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, a="a dog")
    assert main(["caption", ".", "--attention", "."]) == 0
    (folder / "a.attention.png").rename(folder / "b.attention.png")
    assert main(["caption", "."]) == 0
    assert capsys.readouterr().out == "./a.jpg\ta dog\n" * 2


def test_scores_that_are_no_numbers_end_the_command_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_numbers(self: Any, images: list[Any], **_: Any) -> list[Any]:
        if images:
            raise FloatingPointError("The model's scores for row 0 are NaN")
        return []

    monkeypatch.setattr(FakeCaptioner, "caption", no_numbers)
    put(folder, a="a dog")
    assert main(["caption", "a.jpg"]) == 1
    assert capsys.readouterr() == ("", "mmattn: The model's scores for row 0 are NaN\n")


def test_a_full_disk_and_a_closed_output_are_no_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    put(folder, a="a dog")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert main(["caption", "a.jpg"]) == 1
    assert capsys.readouterr().err == "mmattn: [Errno 28] No space left on device\n"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(["caption", "a.jpg"]) == 0
        sys.stdout.close()


def test_folders_and_patterns_give_their_images_sorted(folder: Path) -> None:
    for name in ("x/b.png", "x/a.JPG", "x/deep/c.webp", "x/notes.txt", "x/.hidden.jpg", "x/.git/d.jpg", "[1].jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "empty").mkdir()
    names = [str(Path("x", name)) for name in ("a.JPG", "b.png", "deep/c.webp")]
    assert [name for name, _ in photos(["x"])] == names
    assert [name for name, _ in photos(["x/*.png", "[1].jpg"])] == [str(Path("x/b.png")), "[1].jpg"]
    assert [name for name, _ in photos(["x/**/*.[wp]*"])] == [str(Path("x/b.png")), str(Path("x/deep/c.webp"))]
    for nothing in ("empty", "*.gif"):
        [(name, problem)] = photos([nothing])
        assert name == nothing and isinstance(problem, OSError)


def test_standard_input_is_a_photo(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"a dog")))
    assert main(["caption", "-"]) == 0
    assert capsys.readouterr().out == "-\ta dog\n"
    assert main(["caption", "-", "-"]) == 2
    capsys.readouterr()

    class Unreadable:
        def read(self, size: int) -> bytes:
            raise IsADirectoryError(21, "Is a directory")

    for stdin, reason in [
        (None, "standard input is closed"),
        (types.SimpleNamespace(buffer=Unreadable()), "standard input cannot be read (Is a directory)"),
    ]:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["caption", "-"]) == 1
        assert capsys.readouterr() == ("", f"mmattn: -: {reason}\n")


def test_photos_are_described_in_batches_of_the_readable_ones(folder: Path) -> None:
    put(folder, a="1", b="2", c="3")
    (folder / "no_images").mkdir()
    assert main(["caption", "a.jpg", "no_images", "b.jpg", "c.jpg", "--batch-size", "3"]) == 1
    assert FakeCaptioner.calls == [["a.jpg", "b.jpg"], ["c.jpg"]]


def test_attention_pictures_never_overwrite_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x/a.jpg", "y/a.jpg", "y/A.png", "a-2.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    assert main(["caption", "--json", "--attention", "out/deep", "x/a.jpg", "y/a.jpg", "y/A.png", "a-2.jpg"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    pictures = [Path(record["attention"]) for record in records]
    assert [picture.read_text() for picture in pictures] == ["x/a.jpg", "y/a.jpg", "y/A.png", "a-2.jpg"]
    assert all(picture.parent == Path("out/deep") and picture.name.endswith(".attention.png") for picture in pictures)


def test_a_picture_that_cannot_be_written_is_a_failure_of_that_photo(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FakeCaptioner, "save_attention", full)
    put(folder, a="a dog")
    assert main(["caption", "a.jpg", "--attention", "out"]) == 1
    out, err = capsys.readouterr()
    assert out == "a.jpg\ta dog\n" and "a.jpg: no attention picture" in err and "No space left" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["caption"],
        ["capt", "a.jpg"],
        ["caption", "a.jpg", "--beams", "0"],
        ["caption", "a.jpg", "--beams", "two"],
        ["caption", "a.jpg", "--beams", "2", "--nbest", "3"],
        ["caption", "a.jpg", "--attention", "a.jpg"],
        ["caption", "a.jpg", "--unknown"],
        ["info"],
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_why(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, a="a dog")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "mmattn" in err


def test_a_broken_bundle_is_one_line_and_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", "a.jpg", "--bundle", "broken"]) == 1
    assert capsys.readouterr() == ("", "mmattn: weights.npz: it was changed\n")
    assert main(["info", "no such bundle"]) == 1
    assert "no such bundle" in capsys.readouterr().err
    assert main(["info", "x" * 5000]) == 1
    assert "neither a folder nor a shipped bundle" in capsys.readouterr().err


def test_a_translators_bundle_is_named_with_its_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mmattn.bundle_files.read_info", lambda path: {"kind": "translator"})
    put(folder, a="a dog")
    assert main(["caption", "a.jpg"]) == 2
    assert capsys.readouterr().err.endswith("a captioner is needed here. Its command is: mmattn translate\n")


def test_a_backend_that_is_not_installed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str | None) -> None:
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    monkeypatch.setattr(FakeCaptioner, "load", load)
    assert main(["caption", "a.jpg"]) == 1
    assert "KERAS_BACKEND" in capsys.readouterr().err


def test_interrupting_exits_with_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeCaptioner, "load", load)
    assert main(["caption", "a.jpg"]) == 130


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which fails if a backend is loaded."""
    code = (
        "import sys, mmattn.cli; code = mmattn.cli.main(sys.argv[1:]); "
        "assert not {'keras', 'tensorflow', 'numpy', 'hydra'} & set(sys.modules); sys.exit(code)"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_version_and_help_load_no_backend(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mmattn" in done.stdout


def test_a_wrong_command_line_loads_no_backend() -> None:
    assert run("caption", "a.jpg", "--beams", "0").returncode == 2


@pytest.mark.parametrize("name", ["train", "evaluate", "compare"])
def test_the_help_of_an_experiment_lists_its_groups(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    groups = {path for path in resource("conf").iterdir() if path.is_dir()}
    if name != "compare":
        groups = {path for path in groups if path.name != "comparison"}
        assert "comparison=" not in out
    if name == "evaluate":
        groups = {path for path in groups if path.name in ("data", "runtime")}
        assert "optimizer=" not in out
    for group in groups:
        line = next(line for line in out.splitlines() if line.strip().startswith(f"{group.name}="))
        assert all(path.stem in line for path in group.glob("*.yaml"))


@pytest.mark.parametrize("name", ["train", "evaluate", "compare"])
def test_experiments_get_the_rest_of_the_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    module = types.ModuleType(name)
    module.main = lambda argv: got.append(argv) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"mmattn.experiments.{name}", module)
    assert main([name, "size=tiny", "--cfg", "job", "-m"]) == 3
    assert got == [["size=tiny", "--cfg", "job", "-m"]]


def test_experiments_load_by_file_location() -> None:
    module = experiment("train")
    assert module.__name__ == "mmattn.experiments.train"
    assert Path(str(module.__file__)).parent == resource("experiments")
    assert experiment("train") is module


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    code = "import sys, mmattn.cli; sys.exit(mmattn.cli.main(['train', '--help']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("chosen", [None, "0"])
def test_only_start_up_notices_are_held_back_and_only_if_no_level_was_chosen(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    if chosen is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", chosen)
    notice = "I0000 00:00:1795974166.715934   23977 port.cc:153] oneDNN custom operations are on.\n"
    with quiet_start():
        os.write(2, notice.encode() + b"a real problem\n")
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == (chosen or "3")
    assert capfd.readouterr().err == ("" if chosen is None else notice) + "a real problem\n"


def test_ctrl_c_while_loading_counts_also_where_a_library_catches_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    try:
        with pytest.raises(KeyboardInterrupt), quiet_start():
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
            reached.append(True)
        assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with quiet_start():
            pass
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_while_loading_ends_the_command_quietly(tmp_path: Path) -> None:
    code = (  # says so when the command begins to load Keras
        "import sys, mmattn.cli\n"
        "class Teller:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'keras': print('go', flush=True)\n"
        "sys.meta_path.insert(0, Teller())\n"
        "sys.exit(mmattn.cli.main(['info', sys.argv[1]]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmattn {mmattn.__version__}\n"


def test_an_unknown_backend_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "foo")
    assert main(["info", "default"]) == 2
    assert "KERAS_BACKEND=foo is no backend of mmattn's. Those are: tensorflow, jax, torch" in capsys.readouterr().err
