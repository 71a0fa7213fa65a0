"""`mmattn translate` and `mmattn generate`: as many lines out as in, whatever happens on the way."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mmattn.cli import main
from mmattn.cli import translate as command
from mmattn.cli.rendering import one_line


@dataclass(frozen=True)
class FakeTranslation:
    text: str
    score: float = -0.5
    confidence: float = 0.6
    alternatives: tuple[Any, ...] = ()


class TooLong(ValueError):
    reason = "it is too long"


class FakeTranslator:
    """Turns each sentence round. One of more than 50 characters is too long; at 'stop' someone presses Ctrl-C."""

    calls: list[list[str]]

    @classmethod
    def load(cls, name: str | None) -> FakeTranslator:
        from mmattn.bundle import BundleError

        if name == "broken":
            raise BundleError("weights.npz: it was changed")
        cls.calls = []
        return cls()

    def translate(
        self,
        texts: list[str],
        *,
        nbest: int,
        batch_size: int,
        on_error: str,
        progress: Any = None,
        num_beams: int = 5,
        length_penalty: float = 1.0,
        patience: float = 2.0,
        max_length: int = 99,
    ) -> list[Any]:
        if nbest > num_beams:
            raise ValueError(f"nbest={nbest} translations need at least as many beams; there are {num_beams}")
        if texts:
            self.calls.append(list(texts))
        results = []
        for text in texts:
            if text == "stop":
                raise KeyboardInterrupt
            if text == "nan":
                raise FloatingPointError("The model's scores for row 0 are NaN")
            others = (
                tuple(FakeTranslation(f"{text[::-1]} {n}", -n) for n in range(2, nbest + 1)) if text.strip() else ()
            )
            found = FakeTranslation(text[::-1].strip(), alternatives=others)
            results.append(TooLong() if len(text) > 50 else found)
            if progress is not None:
                progress(len(results), len(texts))
        return results

    def save_attention(self, text: str, path: Path, translation: FakeTranslation) -> None:
        if not translation.text:
            raise ValueError("an alignment needs at least one word on each side")
        Path(path).write_text(f"{text}>{translation.text}")


class FakeWriter:
    calls: list[dict[str, Any]]

    @classmethod
    def load(cls, name: str | None) -> FakeWriter:
        cls.calls = []
        return cls()

    def write(self, prompt: str, **settings: Any) -> list[str]:
        self.calls.append(settings)
        if settings.get("top_p", 1.0) > 1.0:
            raise ValueError("generation.top_p=2.0 must be a number from 0 to 1")
        return [f"{prompt} and so on\nfor ever {n}\x1b[2J" for n in range(settings["count"])]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a Translator that turns sentences round."""
    module = types.ModuleType("mmattn.inference")
    module.Translator = FakeTranslator  # type: ignore[attr-defined]
    module.Writer = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmattn.inference", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FAKED = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_cli_translate as t; t.fake_main()"


def translate(*arguments: str, code: int = 0) -> None:
    assert main(["translate", *arguments]) == code


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_each_sentence_gives_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translate("ab c", "", "犬が")
    assert capsys.readouterr() == ("c ba\n\nが犬\n", "")


def test_a_sentence_that_fails_is_an_empty_line_and_the_others_are_translated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    translate("ab", "x" * 60, "cd", code=1)
    assert capsys.readouterr() == ("ba\n\ndc\n", "mmattn: sentence 2: it is too long\n")


def test_nbest_gives_number_translation_and_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translate("ab", " ", "--nbest", "2")
    assert capsys.readouterr().out == "1\tba\t-0.5000\n1\tba 2\t-2.0000\n2\t\t-0.5000\n"


def test_json_gives_one_object_a_line_failures_included(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translate("a\u2028\x1bb", "x" * 60, "--json", "--nbest", "2", code=1)
    first, second = capsys.readouterr().out.splitlines()  # which also splits at U+2028
    assert json.loads(first) == {
        "line": 1,
        "source": "a\u2028\x1bb",
        "translation": "b\x1b\u2028a",
        "score": -0.5,
        "confidence": 0.6,
        "alternatives": [{"translation": "b\x1b\u2028a 2", "score": -2}],
    }
    assert json.loads(second) == {"line": 2, "source": "x" * 60, "error": "it is too long"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_commands_and_a_file_gets_the_plain_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\\m13[\x1b\tb\na"
    translate(text)
    assert capsys.readouterr().out == "a b \x1b[31m\\\n"
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        translate(text)
    assert terminal.getvalue() == "a b \\x1b[31m\\\n"


def test_no_character_of_a_translation_ends_a_line() -> None:
    for code in range(0x3000):
        text = one_line(f"a{chr(code)}b")
        assert len(text.splitlines()) == 1 and "\t" not in text and len(text) == 3


@pytest.mark.parametrize("output", [None, "-", "out.txt"])
@pytest.mark.parametrize("packed", [None, gzip.compress, lzma.compress])
def test_a_file_gives_as_many_lines_in_its_order(
    folder: Path, output: str | None, packed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows of several sizes, blank lines, CR LF, no end of line at the end, a form feed inside a line."""
    rng = random.Random(1)
    lines = ["".join(rng.choices("abc äß犬\f\u2028", k=rng.randrange(0, 30))) for _ in range(5000)] + ["end"]
    data = "\n".join(line + ("\r" if n % 5 == 0 else "") for n, line in enumerate(lines)).encode()
    Path("in").write_bytes(packed(data) if packed else data)
    translate("--input", "in", *(["--output", output] if output else []), "--batch-size", "2")
    found = Path(output).read_bytes().decode() if output == "out.txt" else capsys.readouterr().out
    lines = [line[:-1] if line.endswith("\r") else line for line in lines]
    assert found == "".join(re.sub("[\f\u2028]", " ", line[::-1].strip()) + "\n" for line in lines)
    assert [len(call) for call in FakeTranslator.calls][:4] == [8, 16, 32, 64]
    assert files(folder) == {"in"} | ({"out.txt"} if output == "out.txt" else set())


def test_an_empty_file_gives_an_empty_file(folder: Path) -> None:
    Path("in").write_bytes(b"")
    translate("--input", "in", "--output", "out")
    assert Path("out").read_bytes() == b"" and files(folder) == {"in", "out"}


def test_standard_input_is_a_file(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAKED, "translate", "--input", "-"], input=b"ab\n\ncd", capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ba\n\ndc\n", b"")


def fake_main() -> None:
    """The command in a process of its own, with the Translator of this file, which waits at 'wait'."""
    module = types.ModuleType("mmattn.inference")

    class Waiting(FakeTranslator):
        def translate(self, texts: list[str], **options: Any) -> list[Any]:
            if "wait" in texts:
                print("waiting", flush=True)
                time.sleep(60)
            return super().translate(texts, **options)

    module.Translator = Waiting  # type: ignore[attr-defined]
    bundle = types.ModuleType("mmattn.bundle")  # the real one takes seconds to load
    bundle.BundleError = ValueError  # type: ignore[attr-defined]
    sys.modules |= {"mmattn.inference": module, "mmattn.bundle": bundle}
    command.check_kind = lambda name, kind: {}  # type: ignore[assignment]
    sys.exit(main())


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("sent, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_stopped_run_keeps_whole_windows_and_the_same_command_goes_on(
    folder: Path, sent: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "check_kind", lambda name, kind: {})  # as in the process that is stopped
    lines = [f"line {n}" for n in range(20)]
    Path("in").write_text("\n".join([*lines[:10], "wait", *lines[10:]]))
    arguments = ["translate", "--input", "in", "--output", "out", "--batch-size", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", FAKED, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(getattr(signal, sent))
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    if sent != "SIGKILL":
        kept = f"4 lines are done and kept in {folder.resolve() / 'out.part'}; the same command goes on after them"
        assert err == f"mmattn: {kept}\n"
    assert Path("out.part").read_text() == "".join(line[::-1] + "\n" for line in lines[:4])
    with open("out.part", "ab") as file:
        file.write(b"half a li")  # as a crash while writing leaves it
    assert main(arguments) == 0
    assert FakeTranslator.calls[0][0] == lines[4]
    assert Path("out").read_text().splitlines() == [line[::-1] for line in [*lines[:10], "wait", *lines[10:]]]
    assert files(folder) == {"in", "out"}


def stopped(*arguments: str, lines: int = 4) -> None:
    """A run that was interrupted after some lines of 'in'."""
    Path("in").write_text("\n".join([f"line {n}" for n in range(lines)] + ["stop", "last"]))
    translate("--input", "in", "--output", "out", "--batch-size", "1", *arguments, code=130)
    assert files(Path()) == {"in", "out.part", "out.part.json"}
    Path("in").write_text(Path("in").read_text().replace("stop", "go on"))


@pytest.mark.parametrize(
    "again, words",
    [
        (["--nbest", "2"], "was begun with other settings: nbest=1, now 2"),
        (["--json"], "json=False, now True"),
        (["--beams", "3"], "num_beams=None, now 3"),
        (["--length-penalty", "0.5"], "length_penalty=None, now 0.5"),
        (["--patience", "1"], "patience=None, now 1.0"),
    ],
)
def test_a_part_made_with_other_settings_is_refused_until_it_is_thrown_away(
    folder: Path, again: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped()
    before = Path("out.part").read_bytes()
    capsys.readouterr()
    translate("--input", "in", "--output", "out", *again, code=2)
    assert words in capsys.readouterr().err and Path("out.part").read_bytes() == before
    translate("--input", "in", "--output", "out", *again, "--restart")
    assert FakeTranslator.calls[0][0] == "line 0" and files(folder) == {"in", "out"}


@pytest.mark.parametrize("restart", [[], ["--restart"]])
def test_a_bundle_that_does_not_load_leaves_the_part_alone(
    folder: Path, restart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stopped()
    before = Path("out.part").read_bytes()
    capsys.readouterr()
    translate("--input", "in", "--output", "out", "--bundle", "broken", *restart, code=1)
    assert "weights.npz: it was changed" in capsys.readouterr().err and Path("out.part").read_bytes() == before


def test_a_part_made_with_another_bundle_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check_kind", lambda name, kind: {"digest": name})
    stopped("--bundle", "one")
    capsys.readouterr()
    translate("--input", "in", "--output", "out", "--bundle", "two", code=2)
    assert "other settings: the bundle. Give the same" in capsys.readouterr().err


def test_a_part_made_of_another_text_is_refused_and_what_follows_it_may_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped()
    text = Path("in").read_text()
    for other in (text.replace("line 3", "line x"), "line 0\nline 1"):
        Path("in").write_text(other)
        translate("--input", "in", "--output", "out", code=2)
        assert "was begun with another input: its first 4 lines are not those of in" in capsys.readouterr().err
    Path("in").write_text(text.replace("last", "new end"))
    translate("--input", "in", "--output", "out", "--batch-size", "5")
    assert Path("out").read_text() == "0 enil\n1 enil\n2 enil\n3 enil\nno og\ndne wen\n"


def test_a_part_that_is_not_ours_or_was_cut_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("a")
    Path("out.part").write_text("precious")
    for more in ([], ["--restart"]):
        translate("--input", "in", "--output", "out", *more, code=2)
        assert "wasn't written by this command. Move it away" in capsys.readouterr().err
    assert Path("out.part").read_text() == "precious"
    Path("out.part").unlink()
    stopped()
    os.truncate("out.part", 3)
    translate("--input", "in", "--output", "out", code=2)
    assert "it is too short" in capsys.readouterr().err
    Path("out.part.json").write_text("{")
    translate("--input", "in", "--output", "out", code=2)
    assert "damaged. --restart throws" in capsys.readouterr().err
    translate("--input", "in", "--output", "out", "--restart")
    assert len(Path("out").read_text().splitlines()) == 6


@pytest.mark.skipif(os.name != "posix", reason="locks a file")
def test_two_runs_never_write_one_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    stopped()
    with open("out.part", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        translate("--input", "in", "--output", "out", code=2)
    assert "Another process is writing" in capsys.readouterr().err
    translate("--input", "in", "--output", "out")


def test_a_bad_line_stops_the_run_with_its_number_and_what_precedes_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bad, words in (
        (b"\xff\xfe", "not UTF-8 (byte 0xff)"),
        (b"x" * 60, "it is too long"),
        (b"\0", "a NUL character"),
    ):
        Path("in").write_bytes(b"ab\n\ncd\n" + bad + b"\nef\n")
        translate("--input", "in", "--output", "out", code=1)
        first, second = capsys.readouterr().err.splitlines()
        assert first == f"mmattn: in:4: {words}. --errors skip leaves such lines empty"
        assert second.startswith("mmattn: 3 lines are done and kept in ")
        translate("--input", "in", code=1)
        assert capsys.readouterr().out == "ba\n\ndc\n"
        Path("in").write_bytes(b"ab\n\ncd\nmended\nef\n")
        translate("--input", "in", "--output", "out")
        assert Path("out").read_text() == "ba\n\ndc\ndednem\nfe\n"
        Path("out").unlink()


def test_bad_lines_are_skipped_on_demand_and_leave_empty_lines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_bytes(b"ab\n\xff\ncd\n" + b"x" * 60)
    translate("--input", "in", "--output", "out", "--errors", "skip", code=1)
    assert Path("out").read_text() == "ba\n\ndc\n\n"
    assert capsys.readouterr().err == "mmattn: in:2: not UTF-8 (byte 0xff)\nmmattn: in:4: it is too long\n"
    translate("--input", "in", "--errors", "skip", "--nbest", "2", code=1)
    assert capsys.readouterr().out.splitlines()[2:5] == ["2\t\t", "3\tdc\t-0.5000", "3\tdc 2\t-2.0000"]
    translate("--input", "in", "--errors", "skip", "--json", code=1)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record.get("error") for record in records] == [None, "not UTF-8 (byte 0xff)", None, "it is too long"]


def test_a_damaged_archive_and_a_missing_file_are_said_in_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)
    data = "\n".join("".join(rng.choices("abcdefgh", k=40)) for _ in range(4000)).encode()
    Path("in.gz").write_bytes(gzip.compress(data)[:-500])
    translate("--input", "in.gz", "--output", "out", code=1)
    err = capsys.readouterr().err
    assert "in.gz: the gzip data are damaged or cut short" in err and "lines are done and kept" in err
    done = Path("out.part").read_text().splitlines()
    assert done == [line[::-1] for line in data.decode().splitlines()[: len(done)]] and len(done) > 3000
    translate("--input", "none", code=1)
    assert capsys.readouterr().err == "mmattn: none: no such file.\n"


def test_an_output_is_never_overwritten_by_accident(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("ab")
    Path("out").write_text("precious")
    translate("--input", "in", "--output", "out", code=2)
    assert "exists. --force replaces it" in capsys.readouterr().err and Path("out").read_text() == "precious"
    translate("--input", "in", "--output", "out", "--force")
    assert Path("out").read_text() == "ba\n"
    Path("link").symlink_to("in")
    for output in ("in", "link", "./in"):
        translate("--input", "in", "--output", output, "--force", code=2)
        assert "the input is" in capsys.readouterr().err
    Path("in.part").write_text("ab")
    translate("--input", "in.part", "--output", "in", "--force", code=2)
    for output, words in (("/dev/null", "no ordinary file"), ("no/such/out", "No such file"), ("out.gz", "plain text")):
        translate("--input", "in", "--output", output, "--force", code=2)
        assert words in capsys.readouterr().err
    assert Path("in").read_text() == "ab" and not Path("/dev/null").is_file()


def test_the_end_of_a_link_is_written_and_the_link_stays(folder: Path) -> None:
    Path("in").write_text("ab")
    Path("real").write_text("old")
    Path("out").symlink_to("real")
    translate("--input", "in", "--output", "out", "--force")
    assert Path("out").is_symlink() and Path("real").read_text() == "ba\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "--input", "in"],
        ["a", "--output", "out"],
        ["--input", "in", "--attention", "x"],
        ["a", "b", "--attention", "x.png"],
        ["a", "--attention", "in/x"],
        ["a", "--nbest", "6"],
        ["a", "--beams", "0"],
        ["a", "--beams", "2", "--nbest", "3"],
        [os.fsdecode(b"\xff")],
        ["--input", "in", "--errors", "maybe"],
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_why(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_text("ab")
    translate(*arguments, code=2)
    out, err = capsys.readouterr()
    assert out == "" and "mmattn" in err and files(folder) == {"in"}


def test_a_broken_bundle_is_one_line_and_leaves_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("ab")
    translate("--input", "in", "--output", "out", "--bundle", "broken", code=1)
    assert capsys.readouterr() == ("", "mmattn: weights.npz: it was changed\n") and files(folder) == {"in"}


def test_scores_that_are_no_numbers_end_the_command_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translate("nan", code=1)
    assert capsys.readouterr() == ("", "mmattn: The model's scores for row 0 are NaN\n")
    Path("in").write_text("nan")
    translate("--input", "in", "--output", "out", code=1)
    assert capsys.readouterr().err == "mmattn: The model's scores for row 0 are NaN\n" and files(folder) == {"in"}


def test_attention_is_drawn_for_each_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translate("ab", "--attention", "deep/one.png", "--json")
    assert json.loads(capsys.readouterr().out)["attention"] == "deep/one.png"
    assert Path("deep/one.png").read_text() == "ab>ba"
    translate("ab", "", "cd", "--attention", "many", code=1)
    out, err = capsys.readouterr()
    assert out == "ba\n\ndc\n" and "many/2.attention.png: no attention picture: an alignment needs" in err
    assert files(Path("many")) == {"1.attention.png", "3.attention.png"}


def test_progress_is_shown_on_a_terminal_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_text("\n".join("ab" for _ in range(300)))
    translate("--input", "in", "--output", "out")
    assert capsys.readouterr() == ("", "")
    now = iter(range(10**6))
    monkeypatch.setattr("mmattn.cli.progress.time.monotonic", lambda: float(next(now)))
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        translate("--input", "in", "--output", "out", "--force")
    shown = [text for text in terminal.getvalue().split("\r\x1b[K") if text]
    assert shown[0] == "1 lines, 0.5 lines/s, 10 min left"  # 2 seconds for 3 of 899 bytes
    assert shown[-1].startswith("300 lines, 1.0 lines/s")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_memory_holds_a_window_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmattn.cli.translate_file._MOST_LINES", 100)
    Path("in").write_text("ab\n" * 1000)
    translate("--input", "in", "--output", "out", "--batch-size", "64")
    assert {len(call) for call in FakeTranslator.calls} == {100}
    assert Path("out").read_text() == "ba\n" * 1000


# Text of a language model


def test_generate_writes_after_its_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "To be", "--count", "2", "--max-length", "9", "--temperature", "0.5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "".join(
        f"{before}To be and so on\nfor ever {n}\x1b[2J\n" for n, before in ((0, ""), (1, "---\n"))
    )
    assert FakeWriter.calls == [{"count": 2, "max_length": 9, "temperature": 0.5, "seed": 3}]


def test_generate_tells_its_seed_and_keeps_commands_off_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == {"prompt": "", "text": " and so on\nfor ever 0\x1b[2J", "seed": FakeWriter.calls[0]["seed"]}
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main(["generate", "a"]) == 0
    assert terminal.getvalue() == "a and so on\nfor ever 0\\x1b[2J\n"


def test_generate_reads_its_prompt_from_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("Être".encode())))
    assert main(["generate", "-"]) == 0
    assert capsys.readouterr().out.startswith("Être and so on")
    for data, words in ((types.SimpleNamespace(buffer=io.BytesIO(b"\xff")), "not UTF-8"), (None, "closed")):
        monkeypatch.setattr(sys, "stdin", data)
        assert main(["generate", "-"]) == 2
        assert words in capsys.readouterr().err


def test_generate_refuses_settings_that_do_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--top-p", "2"]) == 2
    assert "top_p=2.0 must be a number" in capsys.readouterr().err


# Which command a bundle is for


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["translate", "a", "--bundle", "flickr8k_lite0"], "is the bundle of a captioner, and a translator is needed"),
        (["generate", "--bundle", "flickr8k_lite0"], "is the bundle of a captioner, and a language model is needed"),
    ],
)
def test_a_bundle_of_another_kind_is_named_with_its_command(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err and "Its command is: mmattn caption" in err


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles of an untrained translator and an untrained language model."""
    from mmattn.bundle import save_bundle
    from mmattn.decoders import TransformerDecoder
    from mmattn.encoders.text import TextEncoder
    from mmattn.model import EncoderDecoder, LanguageModel
    from mmattn.preprocess.text import Tokenizer

    folder = tmp_path_factory.mktemp("bundles")
    tokenizer = Tokenizer.train(["a red circle", "ein roter Kreis"] * 9, vocabulary_size=64, shrink=True)
    sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "seed": 1}
    encoder = TextEncoder(tokenizer.vocabulary_size, **sizes)
    model = EncoderDecoder(encoder, TransformerDecoder(tokenizer.vocabulary_size, **sizes), share_embeddings=True)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    save_bundle(folder / "translator", model, tokenizer, generation={"max_length": 8, "max_source_length": 40})
    model = LanguageModel(TransformerDecoder(tokenizer.vocabulary_size, cross_attention=False, **sizes))
    model.build({"target_ids": (None, None)})
    save_bundle(folder / "writer", model, tokenizer)
    return folder


@pytest.mark.slow
def test_real_bundles_translate_a_file_as_single_sentences_and_write(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = ["--bundle", str(bundles / "translator")]
    sentences = ["a circle", "", "a red circle", "circle red red", "a"]
    Path("in").write_text("\n".join([*sentences * 5, "a red circle " * 30]))
    translate("--input", "in", "--output", "out", *bundle, "--batch-size", "2", code=1)
    assert "in:26:" in capsys.readouterr().err
    assert len(Path("out.part").read_text().splitlines()) == 25
    translate("--input", "in", "--output", "out", *bundle, "--batch-size", "3", "--errors", "skip", code=1)
    capsys.readouterr()
    translate(*sentences, *bundle, "--attention", "many", code=1)  # of the empty one there is no picture
    out, err = capsys.readouterr()
    assert Path("out").read_text() == out * 5 + "\n" and "many/2.attention.png" in err
    assert Path("many/3.attention.png").read_bytes().startswith(b"\x89PNG")
    assert main(["generate", "a red", "--bundle", str(bundles / "writer"), "--max-length", "9", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("a red")
    assert main(["caption", "x.jpg", *bundle]) == 2
    assert "mmattn translate" in capsys.readouterr().err
