"""Text files and pairs of sentences: the same records from every kind of file, each fault with its file and line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmattn.data.pairs import ParallelSource, TextFileError, TsvSource
from mmattn.data.splits import SPLITS, exact_shares, split_of
from mmattn.data.text_files import is_blank, read_lines, read_text


def hydra_config():
    """Where Hydra is installed: the tests of the other laws do not need it."""
    pytest.importorskip("hydra")
    from experiments import config

    return config


PACKED = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}
WORDS = "a the dog cat man sits runs on in house tree red two ? ! über"
EXAMPLE = "A dog .\nzwei Hunde\u2028und\x85mehr\x0c\x1c\n猫が\rいる\n".encode()


def write(folder: Path, **texts: str) -> Path:
    """Each text as a file with a dot for the underscore in its name."""
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_bytes(text.encode())
    return folder


def records(source) -> list[dict]:
    return [source[index] for index in range(len(source))]


def pairs(source) -> list[tuple[str, str]]:
    return [(record["source"], target) for record in records(source) for target in record["targets"]]


@pytest.mark.parametrize("name", ["plain", *PACKED])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_ends_at_newlines_alone_whatever_the_packing(tmp_path, name, mark, end):
    raw = mark + EXAMPLE.replace(b"\n", end)
    file = tmp_path / "a.gz"  # what it is says its content, not its name
    file.write_bytes(PACKED.get(name, bytes)(raw))
    assert [line.text for line in read_lines(file)] == [line.decode() for line in EXAMPLE.split(b"\n")[:-1]]
    assert read_text(file) == EXAMPLE.decode()
    file.write_bytes(PACKED.get(name, bytes)(raw.removesuffix(end)))
    assert len(list(read_lines(file))) == 3


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_file_that_is_cut_short_or_damaged_is_refused(tmp_path, name):
    file, data = tmp_path / "a.en", PACKED[name](bytes(range(1, 127)) * 3 + b"\n")
    for cut in range(14, len(data) - 1, 7):
        file.write_bytes(data[:cut])
        with pytest.raises(TextFileError, match=f"a.en: the {name} data are damaged or cut short"):
            list(read_lines(file))
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :])
    with pytest.raises(TextFileError, match=f"a.en: the {name} data are damaged"):
        read_text(file)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"fine\ncaf\xe9\n", r"a.en:2: not UTF-8 \(byte 0xe9\)"),
        (b"fine\nfine\n\xed\xa0\x80", r"a.en:3: not UTF-8 \(byte 0xed\)"),
        (b"nul\0l\n", "a.en:1: a NUL character"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path, raw, message):
    write(tmp_path, a_de="x\n" * len(raw.splitlines())).joinpath("a.en").write_bytes(raw)
    with pytest.raises(TextFileError, match=message):
        read_text(tmp_path / "a.en")
    with pytest.raises(TextFileError, match=message):
        ParallelSource(tmp_path / "a.en", tmp_path / "a.de")


def test_files_that_cannot_be_text_are_refused_in_words(tmp_path):
    write(tmp_path, a_de="x\n").joinpath("a.en").write_bytes("one\n".encode("utf-16"))
    for name, message in (("a.en", "begins as UTF-16"), ("b.en", "no such file"), ("", "cannot be read")):
        with pytest.raises(TextFileError, match=message):
            ParallelSource(tmp_path / name, tmp_path / "a.de")


def test_record_n_of_parallel_files_is_line_n_of_both(tmp_path):
    write(tmp_path, a_en=" one \ntwo  2\nthree\n", a_de="eins\nzwei\ndrei")
    source = ParallelSource(tmp_path / "a.en", tmp_path / "a.de")
    assert records(source) == [
        {"id": "a.en:1", "source": "one", "targets": ["eins"]},
        {"id": "a.en:2", "source": "two  2", "targets": ["zwei"]},
        {"id": "a.en:3", "source": "three", "targets": ["drei"]},
    ]
    assert source[-1] == source[np.int64(2)]
    source[0]["targets"].append("x")
    assert source[0]["targets"] == ["eins"] and source.skipped == source.excluded == []
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"no record {index}: there are 3, numbered 0 to 2"):
            source[index]
    back = ParallelSource(tmp_path / "a.en", tmp_path / "a.de", reverse=True)
    assert pairs(back) == [(target, text) for text, target in pairs(source)] and back[1]["id"] == "a.de:2"


def test_different_numbers_of_lines_are_refused_with_both(tmp_path):
    write(tmp_path, a_en="one\ntwo\n", a_de="eins\n")
    with pytest.raises(TextFileError, match=r"a\.en has 2 lines and \S+a\.de has 1"):
        ParallelSource(tmp_path / "a.en", tmp_path / "a.de", problems="skip")


def test_every_fault_is_counted_and_skip_lists_every_one(tmp_path):
    write(tmp_path, a_en="one\n \u3000\u200b\n" + "\n" * 6 + "nine\n", a_de="\n" + "x\n" * 7 + "neun\n")
    files = tmp_path / "a.en", tmp_path / "a.de"
    with pytest.raises(TextFileError) as caught:
        ParallelSource(*files)
    text = str(caught.value)
    assert "8 problems" in text and "and 3 more" in text and "a.de:1: empty target sentence" in text
    source = ParallelSource(*files, problems="skip")
    assert pairs(source) == [("nine", "neun")] and source[0]["id"] == "a.en:9"
    assert source.skipped[1] == f"{files[0]}:2: empty source sentence" and len(source.skipped) == 8
    with pytest.raises(TextFileError, match=r"no pair of sentences is left: 1 line left out"):
        ParallelSource(*map(str, write(tmp_path, b_en="\n", b_de="\n").glob("b.*")), problems="skip")
    with pytest.raises(ValueError, match=r"problems='skp' is unknown. It is one of 'error', 'skip'"):
        ParallelSource(*files, problems="skp")


def test_blank_is_what_has_no_visible_character():
    assert all(map(is_blank, ("", " \t\u3000", "\u200b", "\ufeff\x1f")))
    assert not any(map(is_blank, (".", "\u0301", "\U000fffff", " a")))


def test_sentences_seen_in_training_are_excluded_in_both_directions(tmp_path):
    write(tmp_path, train_en="A dog .\none\n", a_en="a dog .\nA  dog .\ntwo\n", a_ja="犬\n猫\n二\n", train_ja="犬\n")
    english, japanese, seen = tmp_path / "a.en", tmp_path / "a.ja", tmp_path / "train.en"
    for files, side in (((english, japanese), "source"), ((japanese, english), "target")):
        for option in ("either", side):
            source = ParallelSource(*files, exclude_seen_in=seen, exclude_side=option)
            assert [name.split(":")[1] for name in source.excluded] == ["2"]  # the case counts, the blanks do not
            assert len(source) == 2
    assert len(ParallelSource(english, japanese, exclude_seen_in=seen, exclude_side="target")) == 3
    train = ParallelSource(english, japanese, exclude_seen_in=tmp_path / "train.ja")
    assert train.excluded == ["a.en:1"]
    rest = ParallelSource(english, japanese, exclude_seen_in=train)  # another source: its sources and its targets
    assert rest.excluded == ["a.en:2", "a.en:3"]
    with pytest.raises(TextFileError, match="0 lines left out and 3 records excluded"):
        ParallelSource(english, japanese, exclude_seen_in=english)


def sentences(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS.split(), size=random.integers(4, 9))) for _ in range(count)]


def test_no_source_sentence_is_in_two_splits_and_none_is_lost(tmp_path):
    rows = [(text, f"{n % 200} x") for n, text in enumerate([*sentences(3000), *map(str.upper, sentences(500))])]
    write(tmp_path, a_tsv="".join(f"{one}\t{two}\tCC-BY\n" for one, two in rows))
    for options in ({}, {"reverse": True}, {"group": False}):
        parts = {split: TsvSource(tmp_path / "a.tsv", split=split, **options) for split in SPLITS}
        said = {split: {record["source"].casefold() for record in records(part)} for split, part in parts.items()}
        assert sum(map(len, said.values())) == len(set().union(*said.values()))
        whole = TsvSource(tmp_path / "a.tsv", **options)
        joined = Counter(pair for part in parts.values() for pair in pairs(part))
        assert joined == Counter(pairs(whole))
        if options == {"group": False}:
            assert joined == Counter(rows)


@given(st.text(max_size=20), st.integers(0, 2**32 - 1))
def test_the_split_knows_no_case_no_punctuation_and_no_way_of_coding_a_letter(sentence, seed):
    split = split_of(sentence, (0.5, 0.25, 0.25), seed)
    for other in (unicodedata.normalize("NFD", sentence), unicodedata.normalize("NFC", sentence), f" {sentence}\u3000"):
        assert split_of(other, (0.5, 0.25, 0.25), seed) == split
    if any(char.isalnum() for char in unicodedata.normalize("NFKC", sentence)):
        assert split_of(f"¿{sentence} !", (0.5, 0.25, 0.25), seed) == split


def test_shares_hold_and_the_test_share_stays_when_the_others_change():
    texts = list(dict.fromkeys(sentences(12000)))[:8000]
    for shares in ((0.9, 0.05, 0.05), (0.5, 0.45, 0.05), (0.0, 0.0, 1.0), (0.95, 0.05, 0.0)):
        counts = Counter(split_of(text, shares) for text in texts)
        for split, share in zip(SPLITS, shares, strict=True):
            assert abs(counts[split] - share * 8000) <= 4.5 * np.sqrt(8000 * share * (1 - share)), (shares, split)
    kept = [{t for t in texts if split_of(t, s) == "test"} for s in ((0.9, 0.05, 0.05), (0.5, 0.45, 0.05))]
    other = {text for text in texts if split_of(text, seed=1) == "test"}
    assert kept[0] == kept[1] and len(kept[0] & other) < len(other) / 3
    for wrong in ((0.9, 0.1), (0.9, 0.2, -0.1), (0.9, 0.05, 0.06)):
        with pytest.raises(ValueError, match="3 numbers from 0 are needed"):
            exact_shares(wrong)


def test_a_group_has_all_different_translations_in_the_order_of_the_file(tmp_path):
    rows = [("go", "ve"), ("go  ", "vete"), ("Go", "ve"), ("go", " ve "), ("caf\u00e9", "b"), ("cafe\u0301", "a")]
    file = write(tmp_path, a_tsv="".join(f"{one}\t{two}\n" for one, two in rows)) / "a.tsv"
    grouped = defaultdict(list)
    for one, two in rows:
        targets = grouped[unicodedata.normalize("NFC", one).strip()]
        targets.extend([] if two.strip() in targets else [two.strip()])
    assert {record["source"]: record["targets"] for record in records(TsvSource(file))} == grouped
    assert [record["id"] for record in records(TsvSource(file))] == ["a.tsv:1", "a.tsv:3", "a.tsv:5"]
    assert len(TsvSource(file, group=False)) == 6


def test_columns_are_numbers_or_names_of_the_header(tmp_path):
    file = write(tmp_path, a_tsv='id\tde\ten\n7\teins "1\tone\n') / "a.tsv"
    named = TsvSource(file, "en", "de")
    assert records(named) == [{"id": "a.tsv:2", "source": "one", "targets": ['eins "1']}]
    assert pairs(TsvSource(file, 2, 1)) == [("en", "de"), *pairs(named)]
    assert pairs(TsvSource(file, "en", 1, reverse=True)) == [('eins "1', "one")]
    with pytest.raises(TextFileError, match=r"a.tsv:1: 0 columns are called 'fr'. Here are: \['id', 'de', 'en'\]"):
        TsvSource(file, "en", "fr")
    for columns, message in (((1, 1), "must be two columns"), ((-1, 0), "numbered from 0")):
        with pytest.raises(ValueError, match=message):
            TsvSource(file, *columns)
    with pytest.raises(ValueError, match=r"split='dev' is unknown. It is one of train, valid, test"):
        TsvSource(file, split="dev")


def test_a_fault_of_a_split_is_told_by_that_split_alone(tmp_path):
    empty = {split: next(t for t in sentences(999) if split_of(t) == split) for split in SPLITS}
    good = "".join(f"{text}\tx\n" for text in sentences(200))
    file = write(tmp_path, a_tsv=good + "".join(f"{text}\t \n" for text in empty.values()) + "alone\n") / "a.tsv"
    for number, split in enumerate(SPLITS):
        assert TsvSource(file, split=split, problems="skip").skipped == [
            f"{file}:{201 + number}: empty target sentence",
            f"{file}:204: 1 column where 2 are needed (tabs separate columns)",
        ]
    with pytest.raises(TextFileError, match=r"a.tsv: 4 problems.*\n.*a.tsv:201: empty target"):
        TsvSource(file)


def configured(data: str, *overrides: str) -> dict:
    return hydra_config().resolve(
        hydra_config().compose("train", [f"data={data}", *(f"data.{text}" for text in overrides)])
    )["data"]


def test_each_set_has_the_counts_that_its_origin_states(data_folder):
    bpe = configured("multi30k_bpe", f"root={data_folder}/multi30k_bpe_en_de")
    words = configured("multi30k", f"root={data_folder}/multi30k")
    for split, count in (("train", 29000), ("valid", 1014), ("test", 1000)):
        pieces, tokens = hydra_config().instantiate(bpe[split]), hydra_config().instantiate(words[split])
        assert len(pieces) == len(tokens) == count
        both = zip(pairs(pieces), pairs(tokens), strict=True)
        unequal = sum(tuple(t.replace("@@ ", "") for t in one) != two for one, two in both)
        assert unequal <= (split == "train")  # a line of theirs has one blank more
    coco = configured("multi30k_bpe", f"root={data_folder}/multi30k_bpe_en_de", "test_set=coco")
    assert len(hydra_config().instantiate(coco["test"])) == 461
    options = "source_language=de", "target_language=fr", "kind=raw", "test_set=test_2018_flickr"
    raw = hydra_config().instantiate(configured("multi30k", f"root={data_folder}/multi30k", *options)["test"])
    assert len(raw) == 1071 and raw[0]["id"] == "test_2018_flickr.de.gz:1" and raw[0]["source"][0].isupper()


@pytest.mark.parametrize("languages", [("en", "ja"), ("ja", "en")])
def test_sixty_test_sentences_of_enja_are_in_train_by_their_english_side(data_folder, languages):
    options = f"root={data_folder}/enja", f"source_language={languages[0]}", f"target_language={languages[1]}"
    whole, unseen = (configured("enja", *options, f"test_set={name}") for name in ("all", "unseen"))
    tests = [hydra_config().instantiate(config["test"]) for config in (whole, unseen)]
    assert list(map(len, tests)) == [500, 440] and len(tests[1].excluded) == 60
    assert len(hydra_config().instantiate(whole["valid"])) == 500


@pytest.mark.slow
def test_spanish_pairs_are_all_there_and_split_by_english_sentence(data_folder):
    config = configured("spa_eng", f"root={data_folder}/spa_eng")
    parts = [hydra_config().instantiate(config[split]) for split in SPLITS]
    assert sum(len(pairs(part)) for part in parts) == 118964
    said = [{record["source"].casefold() for record in records(part)} for part in parts]
    assert not said[0] & said[1] and not said[0] & said[2] and not said[1] & said[2]


def test_own_files_need_only_their_names(tmp_path):
    write(tmp_path, train_en="one\n", train_de="eins\n", dev_en="two\n", dev_de="zwei\n", t_tsv="one\teins\nx\n")
    languages = "source_language=de", "target_language=en"
    config = configured("parallel", f"root={tmp_path}", *languages, "valid_files=dev")
    assert pairs(hydra_config().instantiate(config["valid"])) == [("zwei", "two")]
    options = f"path={tmp_path}/t.tsv", "shares=[1,0,0]", "problems=skip", "reverse=true"
    source = hydra_config().instantiate(configured("tsv", *options)["train"])
    assert pairs(source) == [("eins", "one")] and len(source.skipped) == 1


def test_a_file_too_small_for_its_splits_says_what_would_help(tmp_path):
    (tmp_path / "few.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match="A small file needs larger shares"):
        for split in ("train", "valid", "test"):
            TsvSource(tmp_path / "few.tsv", split=split)
