"""Laws of the scores of generated captions, and of what is written about a run."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from mmattn.training.callbacks import ProgressLine
from mmattn.training.folder import JsonLines, git_commit
from mmattn.training.subset import First
from mmattn.training.validation import (
    CAPTIONS,
    FinalOptions,
    Prediction,
    Scoring,
    ValidationOptions,
    choose_decoding,
    confidence_threshold,
    predict,
    score_shuffled,
)


class Made(NamedTuple):
    """What a generator answers for a row."""

    text: str
    confidence: float


RECORDS = [{"id": n, "captions": [f"number {n} is here", f"here is {n}"]} for n in range(7)]


def examples():
    """Batches of 3, the last one smaller; the picture of record n is the number n."""
    for start in range(0, 7, 3):
        records = RECORDS[start : start + 3]
        yield {"pixels": [r["id"] for r in records]}, records


def knowing(inputs, **options):
    """Describes rightly with two beams or more, and names a wrong number otherwise."""
    shift = 0 if options.get("num_beams", 1) > 1 else 1
    return [Made(f"number {n + shift} is here", 1 / (1 + n)) for n in inputs["pixels"]]


@pytest.mark.parametrize(("most", "expected"), [(None, 7), (4, 4), (3, 3), (100, 7)])
def test_each_picture_is_described_once_in_order(most, expected):
    made = predict(knowing, examples, {"num_beams": 2}, CAPTIONS, most)
    assert [p.id for p in made] == [str(n) for n in range(expected)]
    assert all(p.text in p.references for p in made)


def test_exact_counts_captions_that_equal_a_reference_word_for_word_after_normalisation():
    made = [
        Prediction("a", "A dog, running!", ["a dog running"], 1.0),
        Prediction("b", "a dog", ["a dog runs", "two dogs"], 1.0),
        Prediction("c", "two dogs", ["a dog runs", "Two dogs."], 1.0),
        Prediction("d", "", ["nothing"], 1.0),
    ]
    assert CAPTIONS(made)["exact"] == 0.5


@pytest.mark.parametrize("count", [2, 3, 50])
def test_shuffling_gives_no_picture_its_own_caption_and_uses_each_caption_once(count):
    made = [Prediction(str(n), f"caption {n}", [f"caption {n}"], 0.5) for n in range(count)]
    seen = []
    scoring = Scoring("captions", (), lambda texts, references: seen.extend(zip(texts, references, strict=True)) or {})
    score_shuffled(made, scoring, seed=3)
    assert sorted(text for text, _ in seen) == sorted(p.text for p in made)
    assert [references for _, references in seen] == [p.references for p in made]
    assert all(text not in references for text, references in seen)


def test_choice_is_the_best_and_of_equals_the_cheapest():
    options = FinalOptions(num_beams=(3, 2, 1), length_penalty=(0.9, 0.6))
    choice = choose_decoding(knowing, examples, {"max_length": 9}, options, CAPTIONS, "exact", lambda text: None)
    assert choice.options == {"max_length": 9, "method": "beam", "num_beams": 2, "length_penalty": 0.6}
    assert len(choice.tried) == 5
    assert all(p.text in p.references for p in choice.predictions)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_threshold_marks_the_share_that_was_asked_for(share):
    made = [Prediction(str(n), "", [], (n + 1) / 1000) for n in range(200)]
    threshold = confidence_threshold(made, share)
    assert sum(p.confidence < threshold for p in made) == int(share * 200)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FinalOptions(num_beams=()), "num_beams"),
        (lambda: FinalOptions(num_beams=(0,)), "num_beams"),
        (lambda: FinalOptions(length_penalty=()), "length_penalty"),
        (lambda: FinalOptions(weights_dtype="int4"), "weights_dtype='int4' is unknown. Known: float16"),
        (lambda: FinalOptions(low_confidence_share=1.0), "low_confidence_share=1.0"),
        (lambda: ValidationOptions(method="sample"), "method='sample' is unknown. Known: greedy, beam"),
        (lambda: ValidationOptions(min_length=9, max_length=9), "min_length=9 must be 0 or more and less than"),
        (lambda: ValidationOptions(examples=0), "examples=0 must be at least 1"),
    ],
)
def test_impossible_options_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_first_of_a_source_is_its_beginning():
    assert [First("abcdef", 4)[n] for n in range(4)] == list("abcd")
    assert len(First("ab", 9)) == 2
    with pytest.raises(IndexError, match="no record 4: there are 4"):
        First("abcdef", 4)[4]


def test_log_passes_over_the_line_that_a_killed_process_left_unfinished(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"step": 1, "text": "schön"})
    with open(log.path, "a") as file:
        file.write('{"step": 2, "te')
    assert log.read() == [{"step": 1, "text": "schön"}]
    log.keep(lambda entry: True)
    log.append({"step": 2})
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2]


def test_commit_is_none_outside_a_repository_and_for_files_that_git_does_not_track(tmp_path):
    (tmp_path / "file.py").touch()
    assert git_commit(tmp_path / "file.py") is None


def test_progress_says_epoch_step_and_what_is_left():
    class Log(list):
        write = list.append

        def flush(self):
            pass

        def isatty(self):
            return False

    log = Log()
    progress = ProgressLine(4, 2, log)
    for step in range(1, 9):
        progress.batch(step, {"loss": 0.5})
    assert [line.split("  ")[:3] for line in log] == [
        ["epoch 1/2", "step 4/4", "loss 0.5"],
        ["epoch 2/2", "step 4/4", "loss 0.5"],
    ]
    assert log[-1].endswith("0 ms to go\n")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_each_number_at_its_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from mmattn.training.tensorboard import scalar_writer

    write = scalar_writer(tmp_path)
    for step in (10, 20):
        write({"step": step, "loss": step / 4, "note": "text"})
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("loss")]
    assert found == [(10, 2.5), (20, 5.0)]
